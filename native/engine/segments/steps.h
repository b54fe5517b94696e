// The progress of calls' steps, and the queue of those that may run.
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
  // Group rank `from` has posted the call too: steps that waited for that may continue.
  void posted(Call& call, int from);

  // The segments of a step below `done` are done: steps that waited for them may continue.
  void advance(Call& call, uint32_t at, uint32_t done);
  // A segment's memory is free again. Segments complete out of order: a short last one is copied at
  // once, links report in any order, and a segment may go into a slot while the peer still reads
  // the one before by reference. `done` never passes a segment that is still borrowed.
  void complete(Call& call, uint32_t at, uint32_t segment);
  // The same for all segments below `done`; some of them may be complete already.
  void complete_below(Call& call, uint32_t at, uint32_t done);
  // Use the next segment of a receive; `from` is null if the bytes lie in place already.
  void consume(Call& call, uint32_t at, const std::byte* from);

  // The next call to run, which stays queued, and the step to attempt; null if none is ready. The
  // oldest first, because peers wait for it too.
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
