// Point to point. The n-th message of a tag from one rank to another has a key that both derive; a
// receive from any source waits until the first frame of a message with one of the keys that can be
// next has come, and is posted under that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "engine/segments/calls.h"

namespace shoal {

// Threads: under the channel's lock.
class Messages {
 public:
  // `most_tags`: that are counted in a group, by pair of ranks.
  Messages(int rank, Calls& calls, size_t most_tags)
      : rank_(rank), calls_(calls), most_tags_(most_tags) {}

  std::shared_ptr<Call> send(Group& group, const Message& message);
  std::shared_ptr<Call> recv(Group& group, const Message& message);

  // A frame of a call that is not posted has come from this rank of the group: receives that wait
  // for it are posted.
  void came_early(Group& group, int from, uint64_t key);

 private:
  std::shared_ptr<Call> prepare(Group& group, const Message& message, int from, int to);
  void wait(Group& group, const std::shared_ptr<Call>& call, int source, int64_t tag);
  void match(Group& group, int64_t tag);
  static int first_to_send(const Group& group, int64_t tag);

  const int rank_;
  Calls& calls_;
  const size_t most_tags_;
};

}  // namespace shoal
