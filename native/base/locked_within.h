// A mutex lock with a deadline.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

#include "base/clock.h"

namespace shoal {

// Lock the mutex, or return an empty lock if that fails within `ns`.
inline std::unique_lock<std::mutex> locked_within(std::mutex& mutex, int64_t ns) {
  const int64_t until = now_ns() + ns;
  std::unique_lock lock(mutex, std::try_to_lock);
  // NOT pthread_mutex_clocklock: glibc 2.28 has none, and GCC's ThreadSanitizer does not recognise
  // it. NOT the wall clock: setting it back would lengthen the wait.
  while (!lock && now_ns() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.try_lock();
  }
  return lock;
}

}  // namespace shoal
