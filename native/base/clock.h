// Monotonic nanoseconds. CLOCK_MONOTONIC is the same for all processes of a host.
#pragma once

#include <cstdint>
#include <ctime>

namespace shoal {

inline int64_t now_ns() {
  timespec at{};
  clock_gettime(CLOCK_MONOTONIC, &at);
  return int64_t{at.tv_sec} * 1'000'000'000 + at.tv_nsec;
}

inline constexpr int64_t kMillisecond = 1'000'000;
inline constexpr int64_t kSecond = 1'000'000'000;

}  // namespace shoal
