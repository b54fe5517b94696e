#include "engine/segments/encoded.h"

#include <algorithm>

namespace shoal {

Encoded::Payload Encoded::take(int peer, size_t n_bytes) {
  const uint32_t n_kept = n_kept_[static_cast<size_t>(peer)];
  if (n_kept > 0 && kept_.size() >= kMost) return {};
  Payload payload;
  payload.room = Reservation(staging_, n_bytes);
  if (!payload.room && n_kept > 0) return {};
  payload.block = staging_.take(n_bytes);
  return payload;
}

void Encoded::keep(uint64_t token, int peer, Payload payload) {
  kept_.emplace(token, Kept{peer, std::move(payload)});
  n_kept_[static_cast<size_t>(peer)]++;
}

void Encoded::give_back(uint64_t token) {
  const auto found = kept_.find(token);
  n_kept_[static_cast<size_t>(found->second.peer)]--;
  kept_.erase(found);
}

void Encoded::wait(int peer, const Waiting& step) {
  auto& waiting = waiting_[static_cast<size_t>(peer)];
  const auto is_step = [&](const Waiting& other) {
    return other.order == step.order && other.step == step.step;
  };
  if (std::none_of(waiting.begin(), waiting.end(), is_step)) waiting.push_back(step);
}

std::vector<Encoded::Waiting> Encoded::sent(uint64_t token) {
  const auto found = kept_.find(token);
  if (found == kept_.end()) return {};
  const auto peer = static_cast<size_t>(found->second.peer);
  give_back(token);
  std::vector<Waiting> waiting = std::exchange(waiting_[peer], {});
  std::sort(waiting.begin(), waiting.end(), [](const Waiting& a, const Waiting& b) {
    return a.order != b.order ? a.order < b.order : a.step > b.step;
  });
  return waiting;
}

void Encoded::drop_peer(int peer) {
  std::erase_if(kept_, [&](const auto& entry) { return entry.second.peer == peer; });
  n_kept_[static_cast<size_t>(peer)] = 0;
  waiting_[static_cast<size_t>(peer)].clear();
}

}  // namespace shoal
