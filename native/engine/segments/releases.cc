#include "engine/segments/releases.h"

namespace shoal {

void Releases::ask(Call& call) {
  for (const int member : call.plan->program->peers) {
    const int peer = (*call.members)[member];
    Link* link = links_[peer];
    if (link == nullptr) continue;
    const uint64_t token = links_.new_token();
    asked_[{peer, token}] = call.shared_from_this();
    call.n_unreleased++;
    if (link->release(token, call.id())) released(peer, token);
  }
}

std::shared_ptr<Call> Releases::released(int peer, uint64_t token) {
  const auto found = asked_.find({peer, token});
  if (found == asked_.end()) return nullptr;
  auto call = std::move(found->second);
  asked_.erase(found);
  call->n_unreleased--;
  return call;
}

std::shared_ptr<Call> Releases::next_of(int peer) {
  const auto next = asked_.lower_bound({peer, 0});
  if (next == asked_.end() || next->first.first != peer) return nullptr;
  return released(peer, next->first.second);
}

void Releases::clear() {
  for (const auto& [question, call] : asked_) {
    call->state.clear();
    call->windows.of_chunk.clear();
  }
  asked_.clear();
}

}  // namespace shoal
