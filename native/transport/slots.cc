#include "transport/slots.h"

#include <algorithm>
#include <atomic>
#include <utility>

namespace shoal {
namespace {

// GCC's ThreadSanitizer does not model fences and refuses to compile them, so they are left out
// under it; it could not have used them.
void memory_fence([[maybe_unused]] std::memory_order order) {
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(order);
#endif
}

}  // namespace

Slots::Slots(std::byte* base, std::atomic<uint64_t>* stamps, uint32_t n_slots, uint32_t quota,
             int n_peers, std::function<Error(uint32_t slot)> reserve)
    : base_(base),
      shown_stamps_(stamps),
      quota_(quota),
      reserve_(std::move(reserve)),
      holders_(n_slots),
      stamps_(n_slots, 0),
      held_by_(static_cast<size_t>(n_peers), 0) {
  // The slot given back last is reused first, because it is the warmest in the cache.
  for (uint32_t slot = n_slots; slot-- > 0;) free_.push_back(slot);
}

Error Slots::take(uint32_t& slot_out) {
  const uint32_t slot = free_.back();
  if (stamps_[slot] == 0 && reserve_)
    if (Error error = reserve_(slot)) return error;
  holders_[slot].reserve(1);  // the first is lent to for sure
  free_.pop_back();
  stamps_[slot]++;
  // A reader that sees bytes written to the slot from here on also sees the new stamp.
  shown_stamps_[slot].store(stamps_[slot], std::memory_order_relaxed);
  memory_fence(std::memory_order_release);
  slot_out = slot;
  return {};
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

Moved Slots::read(const std::byte* slot, const std::atomic<uint64_t>& stamp, uint64_t offered,
                  const Into& into) {
  if (stamp.load(std::memory_order_acquire) != offered) return Moved::kStale;
  into.take(slot);
  memory_fence(std::memory_order_acquire);
  return stamp.load(std::memory_order_relaxed) == offered ? Moved::kDone : Moved::kStale;
}

void Slots::drop_peer(int peer) {
  for (uint32_t slot = 0; slot < holders_.size(); ++slot)
    while (give_back(slot, peer)) {
    }
}

}  // namespace shoal
