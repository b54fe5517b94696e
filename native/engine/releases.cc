#include "engine/releases.h"

namespace shoal {

void Releases::ask(Call& call) {
  for (int buffer = 0; buffer < kBuffers; ++buffer) {
    if (call.memory[buffer].empty()) continue;
    const auto& layout = call.plan->layout[buffer];
    for (uint32_t chunk = 0; chunk < layout.n_bytes.size(); ++chunk)
      for (const int peer : call.plan->program->peers)
        ask(call, (*call.members)[peer], call.chunk(buffer, chunk), layout.n_bytes[chunk]);
  }
  for (const Window& window : call.windows.of_chunk)
    for (const Block& block : window.blocks)
      for (const int peer : call.plan->program->peers)
        ask(call, (*call.members)[peer], block.data(), block.size());
  for (uint32_t at = 0; at < call.state.size(); ++at) {
    const Block& landing = call.state[at].landing;
    if (landing)
      ask(call, call.peer_of(call.plan->program->steps[at]), landing.data(), landing.size());
  }
}

void Releases::ask(Call& call, int peer, const std::byte* from, size_t n_bytes) {
  Link* link = links_[peer];
  if (link == nullptr) return;
  const uint64_t token = links_.new_token();
  asked_[{peer, token}] = call.shared_from_this();
  call.n_unreleased++;
  if (link->release(token, from, n_bytes)) released(peer, token);
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
