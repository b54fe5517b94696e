// The callbacks of an engine to its owner.
#pragma once

#include <functional>

#include "base/error.h"

namespace shoal {

struct Call;
struct Group;

// Threads: all run under the channel's lock, and must not call back in.
struct Hooks {
  // Before a group ends for a deadline, here or on another rank.
  std::function<void(Group&)> on_deadline;
  // Before a group ends; may change the reason. `reported`: peers reported it, or a peer is lost.
  std::function<void(Group&, Error& why, bool reported)> on_ended;
  // Whenever a call finishes or fails.
  std::function<void(Call&)> on_finished;
};

}  // namespace shoal
