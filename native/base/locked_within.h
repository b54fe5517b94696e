// A lock that is not waited for for ever.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <ctime>
#include <mutex>

namespace shoal {

// Holds the mutex, or nothing if it could not be had in that time.
inline std::unique_lock<std::mutex> locked_within(std::mutex& mutex, int64_t ns) {
  constexpr int64_t kBillion = 1'000'000'000;
  timespec until{};
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += (until.tv_nsec + ns) / kBillion;
  until.tv_nsec = (until.tv_nsec + ns) % kBillion;
  // NOT polled with try_lock(): whoever drives a mesh lets go for moments only.
  // NOT by the wall clock: one that is set back makes the wait longer.
  if (pthread_mutex_clocklock(mutex.native_handle(), CLOCK_MONOTONIC, &until) != 0)
    return std::unique_lock(mutex, std::defer_lock);
  return std::unique_lock(mutex, std::adopt_lock);
}

}  // namespace shoal
