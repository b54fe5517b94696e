// How far the steps of calls have come, and which may go on.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>

#include "engine/segments/call.h"
#include "engine/segments/traffic.h"

namespace shoal {

// Threads: under the channel's lock. `now`: of the last tick.
class Steps {
 public:
  Steps(Traffic& traffic, const int64_t& now) : traffic_(traffic), now_(now) {}

  void make_ready(Call& call, uint32_t at);
  // The peer has posted the call too: what waited for its word may go on.
  void posted(Call& call, int from);

  // The segments of a step below `done` are through: steps that waited for them may go on.
  void advance(Call& call, uint32_t at, uint32_t done);
  // A segment's memory is free again. That does not happen in order: a short last segment is copied
  // at once, links report as they like, and a segment may go into a slot while the peer still reads
  // the one before it by reference. `done` never passes one that is still borrowed.
  void complete(Call& call, uint32_t at, uint32_t segment);
  // The same for all segments below `done`, and perhaps some after them.
  void complete_below(Call& call, uint32_t at, uint32_t done);
  // Uses the next segment of a receive; `from` is nullptr when the bytes lie in place already.
  void consume(Call& call, uint32_t at, const std::byte* from);

  // The call to go on with, which stays queued, and the step that it is to attempt; null: none. The
  // oldest first: others wait for it too.
  Call* next(uint32_t& at);
  bool has_work() const { return !runnable_.empty(); }
  bool is_runnable(uint64_t group) const;
  void clear() { runnable_.clear(); }

 private:
  void moved_upto(Call& call, uint32_t at, uint32_t done);

  Traffic& traffic_;
  const int64_t& now_;
  std::deque<std::shared_ptr<Call>> runnable_;
};

}  // namespace shoal
