#include "engine/segments/served_calls.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

namespace shoal {
namespace {

bool has_room(const Group& group) { return group.served.n_in_flight < ServedCalls::kMostInFlight; }

// True if a rank without memory of its own can run the step.
bool is_in_scratch(const Step& step) {
  return step.kind != StepKind::kCopy && step.buffer == kScratch;
}

}  // namespace

std::string ServedCalls::refusal(const Group& group, const Plan& plan) {
  const size_t size = group.members.size();
  const Program& program = *plan.program;
  if (program.sends_to.size() != size)
    return "a plan for " + std::to_string(program.sends_to.size()) +
           " ranks cannot be served in a group of " + std::to_string(size);
  if (plan.n_workers == 0 || plan.n_workers >= size)
    return "only a plan of workers and servers can be served, and this one has " +
           std::to_string(plan.n_workers) + " workers in a group of " + std::to_string(size);
  if (group.rank < static_cast<int>(plan.n_workers))
    return "rank " + std::to_string(group.rank) + " is one of " + std::to_string(plan.n_workers) +
           " workers, and serves nothing";
  const auto& steps = program.steps;
  if (plan.by_pair || !std::all_of(steps.begin(), steps.end(), is_in_scratch))
    return "a served plan may only receive, finish and send chunks of scratch";
  std::vector<bool> is_stored(plan.layout[kScratch].n_bytes.size(), false);
  for (const Step& step : steps) {
    const bool stores = step.kind == StepKind::kRecv && !step.fold;
    if (stores == is_stored[step.chunk])
      return "a served plan must store each chunk of scratch once, before anything else";
    is_stored[step.chunk] = true;
  }
  return {};
}

void ServedCalls::serve(Group& group, std::shared_ptr<const Plan> plan, uint32_t lane) {
  if (group.life.has_ended()) return;
  auto& plans = group.served.plans;
  const uint32_t hash = plan->descriptor_hash;
  if (const auto known = plans.find(hash);
      known != plans.end() && known->second.plan->descriptor != plan->descriptor)
    return judge_.abort_group(
        group,
        {Fault::kResource, group.members[group.rank],
         "cannot distinguish " + known->second.plan->descriptor + " from " + plan->descriptor +
             ", which have the same 32-bit hash; change the length of one buffer"},
        true);
  if (plans.size() == kMostPlans && plans.count(hash) == 0 && !drop_one(group))
    return judge_.abort_group(
        group,
        {Fault::kResource, group.members[group.rank],
         "cannot serve " + plan->descriptor + ": calls of " + std::to_string(kMostPlans) +
             " other kinds wait here; wait for some before you make calls of more kinds"},
        true);
  plans[hash] = {std::move(plan), lane, ++group.served.n_uses};
  for (const auto& [key, frames] : group.early)
    for (const Early& frame : frames)
      if (frame.header.descriptor == hash && !is_message(key)) group.served.waiting.insert(key);
  begin(group);
}

// Drop the least recently used plan without a waiting call. False if there is none.
bool ServedCalls::drop_one(Group& group) {
  auto& plans = group.served.plans;
  std::set<uint32_t> awaited;
  for (const uint64_t key : group.served.waiting)
    if (const auto early = group.early.find(key); early != group.early.end())
      for (const Early& frame : early->second) awaited.insert(frame.header.descriptor);
  const auto rank_of = [&](const auto& one) {
    return std::pair(awaited.count(one.first), one.second.last_use);
  };
  const auto first = std::ranges::min_element(plans, {}, rank_of);
  if (awaited.count(first->first) != 0) return false;
  plans.erase(first);
  return true;
}

void ServedCalls::came_early(Group& group, const Header& header) {
  if (group.served.plans.count(header.descriptor) == 0 || is_message(header.key)) return;
  group.served.waiting.insert(header.key);
  begin(group);
}

// The lowest key first, which is the order of calls without names.
void ServedCalls::begin(Group& group) {
  auto& waiting = group.served.waiting;
  while (!waiting.empty() && has_room(group)) {
    const uint64_t key = *waiting.begin();
    waiting.erase(waiting.begin());
    if (!begin(group, key)) return;
  }
  if (!waiting.empty() && !std::exchange(group.served.is_full, true))
    full_.push_back(group.weak_from_this());
}

// False: the group is about to end.
bool ServedCalls::begin(Group& group, uint64_t key) {
  const auto early = group.early.find(key);
  if (early == group.early.end()) return true;  // it has started already
  auto& plans = group.served.plans;
  // Frames that arrived before the group was created may be from a rank outside it.
  const auto is_known = [&](const Early& frame) {
    return group.rank_of[frame.peer] >= 0 && plans.count(frame.header.descriptor) != 0;
  };
  const auto first = std::find_if(early->second.begin(), early->second.end(), is_known);
  if (first == early->second.end()) return true;  // its frame was dropped for others
  const auto known = plans.find(first->header.descriptor);
  known->second.last_use = ++group.served.n_uses;
  const Lane lane{known->second.lane, 0, nullptr};
  const auto call =
      calls_.prepare(group, known->second.plan, {}, std::numeric_limits<int64_t>::max(), lane);
  if (call->finished) return false;
  call->subject = first->header.subject;
  call->served_for = group.rank_of[first->peer];
  calls_.launch_served(*call, key);
  return true;
}

void ServedCalls::begin_waiting() {
  for (const auto& waiting : std::exchange(full_, {})) {
    const auto group = waiting.lock();
    if (group == nullptr || group->life.has_ended()) continue;
    group->served.is_full = false;
    begin(*group);
  }
}

bool ServedCalls::has_work() const {
  return std::any_of(full_.begin(), full_.end(), [](const auto& waiting) {
    const auto group = waiting.lock();
    return group != nullptr && !group->served.waiting.empty() && has_room(*group);
  });
}

}  // namespace shoal
