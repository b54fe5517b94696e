// Calls that this rank serves: it has a plan for them and no caller. When a peer makes such a call,
// it starts here too.
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

// A call starts when a frame with a served plan's descriptor comes under an unknown key. It has no
// caller's memory, no deadline, and no thread waits for it: it ends with its last step, or with its
// group. Frames of calls whose plan is served later, or for which there is no room yet, wait with
// all other early frames, under their bounds.
//
// Threads: under the channel's lock.
class ServedCalls {
 public:
  // Plans of a group. A job has a few dozen, of 10 to 100 KiB each. Beyond this number the least
  // recently used one without a waiting call is dropped; if calls of all of them wait, the group
  // ends.
  static constexpr size_t kMostPlans = 1024;
  // Calls of a group in flight; each takes about as much memory as a plan and at least one segment
  // of scratch. Ranks whose calls are further out of order than this wait for each other.
  static constexpr size_t kMostInFlight = 256;

  ServedCalls(Calls& calls, Judge& judge) : calls_(calls), judge_(judge) {}

  // Why this group cannot serve a plan; empty if it can.
  static std::string refusal(const Group& group, const Plan& plan);
  // Serve a plan from now on. `lane`: this engine's lane of the plan. Fails the group if another of
  // its plans has the same descriptor hash, or if it has too many.
  void serve(Group& group, std::shared_ptr<const Plan> plan, uint32_t lane);
  // A frame of a call that has not started here was kept.
  void came_early(Group& group, const Header& header);
  // Start waiting calls for which there is room now.
  void begin_waiting();
  bool has_work() const;

 private:
  static bool drop_one(Group& group);
  void begin(Group& group);
  bool begin(Group& group, uint64_t key);

  Calls& calls_;
  Judge& judge_;
  std::vector<std::weak_ptr<Group>> full_;  // groups with calls that wait for room
};

}  // namespace shoal
