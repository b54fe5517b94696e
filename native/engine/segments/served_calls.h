// Calls that this rank serves: it has a plan for them and no caller. A peer makes such a call, and
// it begins here too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/life/judge.h"
#include "engine/segments/calls.h"
#include "engine/segments/group.h"

namespace shoal {

// A call begins when a frame with the descriptor of a served plan has come under a key that this
// rank knows nothing of. It has no memory of a caller's, no deadline, and nobody waits for it: it
// ends with its last step, or with its group. Frames of calls whose plan is served later, or for
// which there is no room yet, wait with all other early frames, under their bounds.
//
// Threads: under the channel's lock.
class ServedCalls {
 public:
  // Plans of a group. A job has a few dozen; each takes 10 to 100 KiB. Beyond that the one goes
  // that was used longest ago.
  static constexpr size_t kMostPlans = 1024;
  // Calls of a group in flight, each of which takes about as much, and at least one segment of
  // scratch. Ranks whose calls are further out of order than that wait for each other.
  static constexpr size_t kMostInFlight = 256;

  ServedCalls(Calls& calls, Judge& judge) : calls_(calls), judge_(judge) {}

  // Why a rank of this group cannot serve a plan; empty if it can.
  static std::string refusal(const Group& group, const Plan& plan);
  // From now on. `lane`: which of those that the plan is cut into is this engine's. Ends the group
  // if frames would not tell the plan from another of it.
  void serve(Group& group, std::shared_ptr<const Plan> plan, uint32_t lane);
  // A frame of a call that this rank has not made was kept.
  void came_early(Group& group, const Header& header);
  // Calls have ended: those that waited for room begin.
  void begin_waiting();
  bool has_work() const;

 private:
  void begin(Group& group);
  bool begin(Group& group, uint64_t key);

  Calls& calls_;
  Judge& judge_;
  std::vector<std::weak_ptr<Group>> full_;  // with calls that wait for room
};

}  // namespace shoal
