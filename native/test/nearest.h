// bfloat16 rounding in numbers, for tests: the nearer of the two neighbours of a float is right.
// Both distances are exact in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace shoal::test {

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The value of a bfloat16; infinity counts as the number that would follow the largest.
inline double size_of_bfloat16(uint16_t bits) {
  const uint32_t magnitude = bits & 0x7fff;
  return magnitude == 0x7f80 ? std::ldexp(1.0, 128) : double{float_of(magnitude << 16)};
}

inline uint16_t nearest(float value) {
  const uint32_t bits = bits_of(value);
  const auto below = static_cast<uint16_t>(bits >> 16);  // towards zero
  if (std::isnan(value)) return below | 0x40;            // quiet
  if (std::isinf(value)) return below;
  const auto above = static_cast<uint16_t>(below + 1);
  const double up = size_of_bfloat16(above) - std::fabs(double{value});
  const double down = std::fabs(double{value}) - size_of_bfloat16(below);
  if (up == down) return below % 2 == 0 ? below : above;
  return up < down ? above : below;
}

// The float that is sent for `value`.
inline float rounded(float value) { return float_of(uint32_t{nearest(value)} << 16); }

}  // namespace shoal::test
