// Failed calls whose memory links have yet to release.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "engine/segments/call.h"
#include "engine/segments/links.h"

namespace shoal {

// Threads: under the channel's lock.
class Releases {
 public:
  explicit Releases(Links& links) : links_(links) {}

  // Ask the links to all peers of a call to release its memory. They are asked by call, since
  // another call may use the same memory. If memory runs out halfway, they are asked again; each
  // answer counts for its own question.
  void ask(Call& call);
  // A link has released a call's memory. Returns the call, or null if none waits for this token.
  std::shared_ptr<Call> released(int peer, uint64_t token);
  // The link to a peer broke or closed, and so has released everything. Returns the next call that
  // waited for it, once per question; null when there are no more.
  std::shared_ptr<Call> next_of(int peer);
  void clear();

 private:
  Links& links_;
  std::map<std::pair<int, uint64_t>, std::shared_ptr<Call>> asked_;  // by peer and token
};

}  // namespace shoal
