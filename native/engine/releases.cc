#include "engine/releases.h"

#include <utility>

namespace shoal {

void Releases::ask(Collective& call) {
  for (int buffer = 0; buffer < kBuffers; ++buffer) {
    if (call.memory[buffer].empty()) continue;
    const auto& layout = call.plan->layout[buffer];
    for (uint32_t chunk = 0; chunk < layout.n_bytes.size(); ++chunk)
      for (const int peer : call.plan->program->peers)
        ask(call, (*call.members)[peer], call.chunk(buffer, chunk), layout.n_bytes[chunk]);
  }
}

void Releases::ask(Collective& call, int peer, const std::byte* from, size_t n_bytes) {
  Link* link = links_[peer];
  if (link == nullptr) return;
  const uint64_t token = links_.new_token();
  asked_[token] = {call.shared_from_this(), peer};
  call.n_unreleased++;
  if (link->release(token, from, n_bytes)) released(token);
}

std::shared_ptr<Collective> Releases::released(uint64_t token) {
  const auto found = asked_.find(token);
  if (found == asked_.end()) return nullptr;
  auto call = std::move(found->second.call);
  asked_.erase(found);
  call->n_unreleased--;
  return call;
}

Releases::Calls Releases::drop_peer(int peer) {
  Calls calls;
  for (auto next = asked_.begin(); next != asked_.end();) {
    if (next->second.peer != peer) {
      ++next;
      continue;
    }
    calls.push_back(std::move(next->second.call));
    calls.back()->n_unreleased--;
    next = asked_.erase(next);
  }
  return calls;
}

}  // namespace shoal
