// Memory of calls that have failed, which links have yet to let go of.
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

  // Asks the links with all peers of a call for its memory, by the call: another may use the same.
  // Where memory runs out in the middle, it is asked for once more; each answer counts for the
  // question it is of.
  void ask(Call& call);
  // A link has let go. The call whose memory that was; null: of none that waits for it.
  std::shared_ptr<Call> released(int peer, uint64_t token);
  // The link with a peer is broken or closed, and so has let go of everything. A call whose memory
  // that was, once for each question; null: there are no more.
  std::shared_ptr<Call> next_of(int peer);
  void clear();  // its calls hold nothing of the engine's any more

 private:
  Links& links_;
  std::map<std::pair<int, uint64_t>, std::shared_ptr<Call>> asked_;  // by peer and token
};

}  // namespace shoal
