// Scratch memory of calls, under the ceiling of staging, and the calls that wait for some.
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

  // Gives a call that has none its scratch if there is room under the ceiling, or if no other call
  // has gone beyond it. Else the step waits for it. No memory at all ends the group.
  bool take(Call& call, uint32_t at);
  bool give_back(Call& call);  // false: it has none
  // To calls that wait for some, now that one has ended. NOT while it ends: where there is no
  // memory for theirs, their group ends, which may be its own.
  void pass_on();
  // A call that has waited for long gets it whatever the ceiling, one at a time.
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
  size_t n_bytes_ = 0;
  uint32_t n_overdrawn_ = 0, most_overdrawn_ = 1;  // calls whose scratch went beyond the ceiling
};

}  // namespace shoal
