// A word in shared memory that the kernel marks when this process dies, from whatever cause.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/error.h"

namespace shoal {

// The word is a robust futex (get_robust_list(2)). A thread of this process, which does nothing
// else, holds it. When that thread ends, the kernel marks the word, before it closes any descriptor
// of the process. A reader need not be in the same pid namespace. A forked child holds none of its
// parent's words.
//
// The list that the kernel follows is in private memory: peers can write the word, but no pointer.
//
// Threads: one at a time.
class DeathMark {
 public:
  static constexpr uint32_t kDied = 0x40000000;  // FUTEX_OWNER_DIED

  DeathMark() = default;
  ~DeathMark() { clear(); }
  DeathMark(const DeathMark&) = delete;
  DeathMark& operator=(const DeathMark&) = delete;

  // Takes the word at the start of a page of shared memory: from now on it is neither 0 nor kDied
  // while this process lives. `offset`: of that page. The caller keeps the descriptor.
  Error set(int fd, size_t offset);
  // Releases the word, which sets it to 0; idempotent.
  void clear();
  // Registers the fork handlers of marks, once. Call it before the handlers of any lock under which
  // marks are set or cleared are registered: before a fork the last registered runs first.
  static void prepare_for_forks();

 private:
  std::byte* pages_ = nullptr;  // [private: what the kernel follows | the shared page]
  uint64_t made_by_ = 0;        // how often its process's line had forked
};

}  // namespace shoal
