// The cores of this process, and how to poll on one.
#pragma once

#include <sched.h>

namespace shoal {

inline int usable_cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace shoal
