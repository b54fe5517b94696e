#include "engine/segments/commits.h"

#include <algorithm>
#include <utility>

#include "engine/segments/group.h"

namespace shoal {

void Commits::expect(Call& call) {
  if (call.plan->n_workers == 0) return;
  const Program& program = *call.plan->program;
  call.commits.results_left.assign(call.members->size(), 0);
  call.commits.owed_by.assign(call.members->size(), false);
  const auto n_flows = [&](const std::vector<uint32_t>& flows) {
    return static_cast<uint32_t>(std::count_if(
        flows.begin(), flows.end(), [&](uint32_t at) { return call.state[at].n_segments > 0; }));
  };
  for (const int peer : program.peers) {
    if (call.plan->is_server(peer) == call.plan->is_server(call.group->rank)) continue;
    const bool gives = call.plan->is_server(peer);
    const uint32_t n_results = n_flows(gives ? program.recvs_from[peer] : program.sends_to[peer]);
    if (n_results == 0) continue;
    if (gives) call.commits.results_left[peer] = n_results;
    call.commits.owed_by[peer] = true;
    call.commits.with.push_back(peer);
  }
  call.commits.n_left = static_cast<uint32_t>(call.commits.with.size());
}

void Commits::send_due(Call& call) {
  for (const int server : std::exchange(call.commits.held_from, {})) send(call, server);
}

void Commits::on_commit(Call& call, int from) {
  const bool is_owed = !call.commits.owed_by.empty() && call.commits.owed_by[from];
  if (!is_owed || !is_possible(call, from))
    return judge_.protocol_error((*call.members)[from],
                                 "committed " + call.doing() + " twice, or before it could");
  call.commits.owed_by[from] = false;
  if (--call.commits.n_left > 0) return;
  if (call.plan->is_server(call.group->rank))
    for (const int worker : call.commits.with) send(call, worker);
  call.is_through = call.steps_left == 0;
}

// A worker cannot commit before it was sent the results, nor a server before this worker has
// committed.
bool Commits::is_possible(const Call& call, int from) {
  if (call.plan->is_server(from)) return call.commits.results_left[from] == 0;
  const auto& sends = call.plan->program->sends_to[from];
  return std::all_of(sends.begin(), sends.end(), [&](uint32_t at) {
    return call.state[at].started == call.state[at].n_segments;
  });
}

void Commits::send(Call& call, int to) {
  links_.send((*call.members)[to], call.frame(FrameType::kCommit, 0, 0));
}

}  // namespace shoal
