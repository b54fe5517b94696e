// Scratch memory of calls, under the staging ceiling, and the calls that wait for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "engine/life/judge.h"
#include "engine/segments/call.h"
#include "engine/segments/staging.h"
#include "engine/segments/steps.h"

namespace shoal {

// Threads: under the channel's lock. `now`: of the last tick.
class Scratch {
 public:
  Scratch(int rank, Staging& staging, Steps& steps, Judge& judge, const int64_t& now)
      : rank_(rank), staging_(staging), steps_(steps), judge_(judge), now_(now) {}

  // Give a call its scratch if there is room under the ceiling, or if no other call exceeds it.
  // Otherwise the step waits (false). If the allocation itself fails, the group ends.
  bool take(Call& call, uint32_t at);
  bool give_back(Call& call);  // false if it had none
  // Give scratch to waiting calls, after one has ended. Must not be called while a call is ending:
  // a failed allocation ends a group, which may be that call's own.
  void pass_on();
  // Give scratch beyond the ceiling to the call that has been the first to wait for long. Every
  // tick calls it.
  void grant_overdue();

  size_t n_bytes() const { return n_bytes_; }  // held now

 private:
  bool give(Call& call);

  const int rank_;
  Staging& staging_;
  Steps& steps_;
  Judge& judge_;
  const int64_t& now_;
  std::deque<std::weak_ptr<Call>> waiting_;
  std::weak_ptr<Call> first_;  // of those that wait, as of the last tick
  int64_t overdue_ns_ = 0;     // when it is overdue
  size_t n_bytes_ = 0;
  uint32_t n_overdrawn_ = 0, most_overdrawn_ = 1;  // calls whose scratch exceeds the ceiling
};

}  // namespace shoal
