#include "engine/segments/needs.h"

#include <algorithm>

namespace shoal {

// A peer that is kGone may have died, and a receive from any source waits for it too.
bool nobody_sends(const Group& group, const Peers& peers) {
  const auto& all = group.members;
  return std::any_of(all.begin(), all.end(),
                     [&](int member) { return peers.is(member, PeerState::kGone); }) ||
         std::none_of(all.begin(), all.end(),
                      [&](int member) { return peers.lives(member) || peers.is_doubted(member); });
}

bool needs(const Call& call, int peer, const Peers& peers) {
  if (call.unmatched) return nobody_sends(*call.group, peers);
  const int from = call.group->rank_of[peer];
  const Program& program = *call.plan->program;
  if (!call.commits.owed_by.empty() && call.commits.owed_by[from]) return true;
  for (const uint32_t at : program.recvs_from[from]) {
    const StepState& state = call.state[at];
    uint32_t n_here = state.done + static_cast<uint32_t>(state.arrived.size());
    for (const Offered& offer : state.offered) {
      const uint32_t end = offer.first + offer.count;
      n_here += end - std::min(end, std::max(offer.first, state.done));
    }
    if (n_here < state.n_segments) return true;
  }
  return std::any_of(program.sends_to[from].begin(), program.sends_to[from].end(),
                     [&](uint32_t at) { return call.state[at].done < call.state[at].n_segments; });
}

bool is_in(const Call& call, size_t rank) {
  const auto& flows = call.plan->program->recvs_from[rank];
  return call.posts.posted_by[rank] || std::any_of(flows.begin(), flows.end(), [&](uint32_t at) {
           const StepState& state = call.state[at];
           return state.done > 0 || !state.arrived.empty() || !state.offered.empty();
         });
}

bool is_here(const StepState& state) {
  return std::any_of(state.arrived.begin(), state.arrived.end(),
                     [&](const Arrived& came) { return came.segment == state.done; }) ||
         (!state.offered.empty() && state.offered.front().first <= state.done);
}

// The ranks that owe `call` data or grants that it could use now, or else those that do not accept
// its data. If some of these have not made the call, only they are named: the others may be waiting
// for the same culprit.
std::string awaited(const Call& call, const std::vector<std::string>& names) {
  if (call.unmatched) return "a message to it";
  constexpr size_t kNamed = 8;  // more would bury the rest of the message
  std::vector<bool> owes(call.group->members.size(), false);
  std::vector<bool> takes_not = owes;
  for (uint32_t at = 0; at < call.state.size(); ++at) {
    const Step& step = call.plan->program->steps[at];
    const StepState& state = call.state[at];
    if (step.peer < 0 || state.done >= call.segments_ready(step)) continue;
    const bool receives = step.kind == StepKind::kRecv;
    if (!receives || !is_here(state)) (receives ? owes : takes_not)[step.peer] = true;
  }
  const auto nobody = [](const std::vector<bool>& in) {
    return std::find(in.begin(), in.end(), true) == in.end();
  };
  if (nobody(owes)) owes = takes_not;
  if (nobody(owes) && call.commits.n_left > 0) owes = call.commits.owed_by;
  std::vector<bool> absent = owes;
  for (size_t rank = 0; rank < owes.size(); ++rank) absent[rank] = owes[rank] && !is_in(call, rank);
  const bool all_in = nobody(absent);
  if (!all_in) owes = absent;
  const size_t n_owing = static_cast<size_t>(std::count(owes.begin(), owes.end(), true));
  std::string text;
  size_t n_named = 0;
  for (size_t rank = 0; rank < owes.size() && n_named < kNamed; ++rank) {
    if (!owes[rank]) continue;
    text += (n_named++ == 0 ? "" : ", ") + names[call.group->members[rank]];
  }
  if (n_owing > kNamed) text += " and " + std::to_string(n_owing - kNamed) + " more";
  if (n_owing == 0) return "this rank's own turn";
  return all_in ? text + " (in the same call, perhaps waiting for another rank)" : text;
}

}  // namespace shoal
