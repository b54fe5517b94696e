#include "base/crc32c.h"

#include <array>

#include "base/crc32c_kernels.h"

namespace shoal {
namespace {

// kTables[k][byte]: the effect of `byte` once k more zero bytes have followed it (slicing by 8).
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables sliced_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) * kCastagnoli);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = sliced_tables();

uint32_t eight_bytes(uint32_t crc, const std::byte* from) {
  uint32_t crossed = 0;
  for (size_t i = 0; i < 4; ++i) {
    const auto byte = (crc >> (8 * i)) ^ static_cast<uint32_t>(from[i]);
    crossed ^= kTables[7 - i][byte & 0xff];
  }
  for (size_t i = 4; i < 8; ++i) crossed ^= kTables[7 - i][static_cast<size_t>(from[i])];
  return crossed;
}

Crc32cFn best_here() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"))
    return crc32c_avx512;
  if (__builtin_cpu_supports("sse4.2")) return crc32c_sse42;
#endif
  return crc32c_tables;
}

}  // namespace

uint32_t crc32c_tables(uint32_t crc, const std::byte* from, size_t n_bytes) {
  for (; n_bytes >= 8; n_bytes -= 8, from += 8) crc = eight_bytes(crc, from);
  for (; n_bytes > 0; --n_bytes, ++from) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ static_cast<uint32_t>(*from)) & 0xff];
  }
  return crc;
}

uint32_t crc32c(uint32_t seed, const void* data, size_t n_bytes) {
  static const Crc32cFn kBest = best_here();
  return ~kBest(~seed, static_cast<const std::byte*>(data), n_bytes);
}

}  // namespace shoal
