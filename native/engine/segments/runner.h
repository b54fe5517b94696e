// Attempts the steps of calls: sends, receives, copies and finishes segments.
#pragma once

#include <cstddef>
#include <cstdint>

#include "engine/segments/scratch.h"
#include "engine/segments/ways.h"

namespace shoal {

// Threads: under the channel's lock.
class Runner {
 public:
  Runner(Links& links, Steps& steps, Scratch& scratch, Ways& ways)
      : links_(links), steps_(steps), scratch_(scratch), ways_(ways) {}

  // Move the next segment of a step (by reference: all that are ready), if possible. Returns the
  // bytes handled.
  size_t attempt(Call& call, uint32_t at);

 private:
  size_t attempt_send(Call& call, uint32_t at);
  size_t attempt_recv(Call& call, uint32_t at);
  size_t attempt_local(Call& call, uint32_t at);

  Links& links_;
  Steps& steps_;
  Scratch& scratch_;
  Ways& ways_;
};

}  // namespace shoal
