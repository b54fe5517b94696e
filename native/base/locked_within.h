// A lock that is not waited for for ever.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

#include "base/clock.h"

namespace shoal {

// Holds the mutex, or nothing if it could not be had in that time.
inline std::unique_lock<std::mutex> locked_within(std::mutex& mutex, int64_t ns) {
  const int64_t until = now_ns() + ns;
  std::unique_lock lock(mutex, std::try_to_lock);
  // NOT pthread_mutex_clocklock: glibc 2.28 has none, and GCC's ThreadSanitizer takes it for no
  // lock. NOT by the wall clock: one that is set back makes the wait longer.
  while (!lock && now_ns() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.try_lock();
  }
  return lock;
}

}  // namespace shoal
