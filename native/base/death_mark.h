// A word in shared memory that the kernel itself marks when this process dies, however it does.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/error.h"

namespace shoal {

// The word is a robust futex (get_robust_list(2)): a thread of this process, which does nothing
// else, holds it, and when that thread is gone the kernel says so in the word, before it closes any
// of the process's descriptors. Nobody need be in the same pid namespace to read it. A forked child
// holds nothing of its parent's.
//
// What the kernel follows on its way lies in private memory: others write the word, no pointer.
//
// Threads: one at a time.
class DeathMark {
 public:
  static constexpr uint32_t kDied = 0x40000000;  // FUTEX_OWNER_DIED

  DeathMark() = default;
  ~DeathMark() { clear(); }
  DeathMark(const DeathMark&) = delete;
  DeathMark& operator=(const DeathMark&) = delete;

  // Holds the word at the beginning of a page of shared memory: from here on it is neither 0 nor
  // kDied while this process lives. `offset`: of that page. The descriptor stays the caller's.
  Error set(int fd, size_t offset);
  // Lets go of it, which makes it 0; idempotent.
  void clear();
  // Registers what marks need across a fork, if it is not: before the handlers of any lock under
  // which marks are set or cleared, since what is registered last is called first before a fork.
  static void prepare_for_forks();

 private:
  std::byte* pages_ = nullptr;  // [private: what the kernel follows | the shared page]
  uint64_t made_by_ = 0;        // how often its process's line had forked
};

}  // namespace shoal
