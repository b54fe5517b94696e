// Point-to-point messages. Both ranks derive the key of the n-th message of a tag between them. A
// receive from any source waits for the first frame under a key that can be next, and is posted
// under that key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "engine/segments/calls.h"

namespace shoal {

// Threads: under the channel's lock.
class Messages {
 public:
  // `most_tags`: how many (pair of ranks, tag) a group may count.
  Messages(int rank, Calls& calls, size_t most_tags)
      : rank_(rank), calls_(calls), most_tags_(most_tags) {}

  std::shared_ptr<Call> send(Group& group, const Message& message);
  std::shared_ptr<Call> recv(Group& group, const Message& message);

  // A frame of a call that is not posted arrived from group rank `from`: post a receive that waits
  // for it.
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
