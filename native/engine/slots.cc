#include "engine/slots.h"

#include <algorithm>

namespace shoal {

Slots::Slots(std::byte* base, uint32_t n_slots, uint32_t quota, int n_peers)
    : base_(base),
      quota_(quota),
      holders_(n_slots),
      stamps_(n_slots, 0),
      held_by_(static_cast<size_t>(n_peers), 0) {
  // Last given back, first reused: it is the warmest in the cache.
  for (uint32_t slot = n_slots; slot-- > 0;) free_.push_back(slot);
}

uint32_t Slots::take() {
  if (free_.empty()) return kNone;
  const uint32_t slot = free_.back();
  free_.pop_back();
  stamps_[slot]++;
  return slot;
}

void Slots::lend(uint32_t slot, int peer) {
  holders_[slot].push_back(peer);
  held_by_[peer]++;
}

bool Slots::give_back(uint32_t slot, int peer) {
  if (slot >= holders_.size()) return false;
  auto& holders = holders_[slot];
  const auto found = std::find(holders.begin(), holders.end(), peer);
  if (found == holders.end()) return false;
  holders.erase(found);
  held_by_[peer]--;
  if (holders.empty()) free_.push_back(slot);
  return true;
}

void Slots::drop_peer(int peer) {
  for (uint32_t slot = 0; slot < holders_.size(); ++slot)
    while (give_back(slot, peer)) {
    }
}

}  // namespace shoal
