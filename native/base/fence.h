// Memory fences. GCC's thread sanitizer does not model them and refuses to compile them: under it
// they are left out, which hides nothing from it that it could have seen.
#pragma once

#include <atomic>

namespace shoal {

inline void memory_fence([[maybe_unused]] std::memory_order order) {
#if !defined(__SANITIZE_THREAD__)
  std::atomic_thread_fence(order);
#endif
}

}  // namespace shoal
