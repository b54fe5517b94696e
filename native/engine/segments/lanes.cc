#include "engine/segments/lanes.h"

#include <new>

namespace shoal {

bool Lanes::end(uint32_t lane, const Error& error) {
  const uint32_t own = 1u << lane;
  std::lock_guard lock(mutex_);
  if ((left_.load(std::memory_order_relaxed) & own) == 0) return false;
  if (error && !error_) try {
      error_ = error;
    } catch (const std::bad_alloc&) {
      error_ = {error.fault, error.peer, "out of memory"};  // short enough to need none
    }
  return left_.fetch_and(~own, std::memory_order_acq_rel) == own;
}

std::shared_ptr<std::byte[]> Lanes::scratch(uint64_t n_bytes) {
  std::lock_guard lock(mutex_);
  auto block = scratch_.lock();
  if (block == nullptr) scratch_ = block = uncleared(n_bytes);
  return block;
}

std::shared_ptr<std::byte[]> uncleared(uint64_t n_bytes) {
  std::unique_ptr<std::byte[]> block(new (std::nothrow) std::byte[n_bytes]);
  if (block == nullptr) return nullptr;
  try {
    return block;
  } catch (const std::bad_alloc&) {  // for its count
    return nullptr;
  }
}

}  // namespace shoal
