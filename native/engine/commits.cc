#include "engine/commits.h"

#include <algorithm>
#include <utility>

#include "engine/group.h"

namespace shoal {

void Commits::expect(Call& call) {
  if (call.plan->n_workers == 0) return;
  const Program& program = *call.plan->program;
  call.results_left.assign(call.members->size(), 0);
  call.owes_commit.assign(call.members->size(), false);
  const auto n_flows = [&](const std::vector<uint32_t>& flows) {
    return static_cast<uint32_t>(std::count_if(
        flows.begin(), flows.end(), [&](uint32_t at) { return call.state[at].n_segments > 0; }));
  };
  for (const int peer : program.peers) {
    if (call.plan->is_server(peer) == call.plan->is_server(call.group->rank)) continue;
    const bool gives = call.plan->is_server(peer);
    const uint32_t n_results = n_flows(gives ? program.recvs_from[peer] : program.sends_to[peer]);
    if (n_results == 0) continue;
    if (gives) call.results_left[peer] = n_results;
    call.owes_commit[peer] = true;
    call.commits_with.push_back(peer);
  }
  call.n_commits_left = static_cast<uint32_t>(call.commits_with.size());
}

void Commits::tell(Call& call) {
  for (const int server : std::exchange(call.held_from, {})) send(call, server);
}

void Commits::heard(Call& call, int from) {
  const bool is_owed = !call.owes_commit.empty() && call.owes_commit[from];
  if (!is_owed || !is_possible(call, from))
    return judge_.protocol_error((*call.members)[from],
                                 "committed " + call.doing() + " twice, or before it could");
  call.owes_commit[from] = false;
  if (--call.n_commits_left > 0) return;
  if (call.plan->is_server(call.group->rank))
    for (const int worker : call.commits_with) send(call, worker);
  call.is_through = call.steps_left == 0;
}

// A worker holds no more than it was sent; a server has heard all workers, of whom this is one.
bool Commits::is_possible(const Call& call, int from) {
  if (call.plan->is_server(from)) return call.results_left[from] == 0;
  const auto& sends = call.plan->program->sends_to[from];
  return std::all_of(sends.begin(), sends.end(), [&](uint32_t at) {
    return call.state[at].started == call.state[at].n_segments;
  });
}

void Commits::send(Call& call, int to) {
  links_.send((*call.members)[to], call.frame(FrameType::kCommit, 0, 0));
}

}  // namespace shoal
