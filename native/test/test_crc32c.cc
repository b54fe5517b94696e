// The checksum against the check values of its specifications and against the definition, bit by
// bit.

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/crc32c.h"
#include "base/crc32c_kernels.h"
#include "test/check.h"

namespace shoal {
namespace {

uint32_t bit_by_bit(uint32_t seed, const uint8_t* from, size_t n_bytes) {
  uint32_t crc = ~seed;
  for (size_t i = 0; i < n_bytes; ++i) {
    crc ^= from[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) != 0 ? (crc >> 1) ^ 0x82F63B78U : crc >> 1;
  }
  return ~crc;
}

std::vector<uint8_t> noise(size_t n_bytes) {
  std::vector<uint8_t> bytes(n_bytes);
  uint32_t state = 12345;
  for (uint8_t& byte : bytes) {
    state = state * 1664525 + 1013904223;
    byte = static_cast<uint8_t>(state >> 24);
  }
  return bytes;
}

std::vector<Crc32cFn> kernels() {
  std::vector<Crc32cFn> all{crc32c_tables};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) all.push_back(crc32c_sse42);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq"))
    all.push_back(crc32c_avx512);
#endif
  return all;
}

}  // namespace

TEST("CRC32C of the nine digits is its check value") {
  constexpr std::string_view kDigits = "123456789";
  CHECK_EQ(crc32c(0, kDigits.data(), kDigits.size()), 0xE3069283U);
}

TEST("CRC32C gives the check values of RFC 3720 appendix B.4") {
  std::vector<uint8_t> bytes(32, 0);
  CHECK_EQ(crc32c(0, bytes.data(), 32), 0x8A9136AAU);
  bytes.assign(32, 0xff);
  CHECK_EQ(crc32c(0, bytes.data(), 32), 0x62A8AB43U);
  for (size_t i = 0; i < 32; ++i) bytes[i] = static_cast<uint8_t>(i);
  CHECK_EQ(crc32c(0, bytes.data(), 32), 0x46DD794EU);
  for (size_t i = 0; i < 32; ++i) bytes[i] = static_cast<uint8_t>(31 - i);
  CHECK_EQ(crc32c(0, bytes.data(), 32), 0x113FDB5CU);
}

TEST("CRC32C of no bytes is the seed") {
  CHECK_EQ(crc32c(0, nullptr, 0), 0U);
  CHECK_EQ(crc32c(0xE3069283U, nullptr, 0), 0xE3069283U);
}

TEST("every kernel equals the definition at every length and start") {
  const std::vector<uint8_t> bytes = noise(20000);
  std::vector<size_t> lengths{1023, 1024, 4096, 6143, 6144, 6145, 12288, 12289, 13000, 19990};
  for (size_t n = 0; n <= 800; ++n) lengths.push_back(n);
  for (const size_t n_bytes : lengths) {
    for (const size_t start : {0, 1, 3, 8}) {
      const uint32_t truth = bit_by_bit(0x1234, bytes.data() + start, n_bytes);
      const auto* from = reinterpret_cast<const std::byte*>(bytes.data() + start);
      for (const Crc32cFn kernel : kernels()) CHECK_EQ(~kernel(~0x1234U, from, n_bytes), truth);
    }
  }
}

TEST("a checksum can be continued over the next piece") {
  const std::vector<uint8_t> bytes = noise(10007);
  const uint32_t whole = crc32c(0, bytes.data(), bytes.size());
  for (const size_t cut : {0, 1, 7, 64, 6144, 10006, 10007}) {
    const uint32_t first = crc32c(0, bytes.data(), cut);
    CHECK_EQ(crc32c(first, bytes.data() + cut, bytes.size() - cut), whole);
  }
}

TEST("one flipped bit changes the checksum") {
  std::vector<uint8_t> bytes = noise(7000);
  const uint32_t before = crc32c(0, bytes.data(), bytes.size());
  for (size_t at = 0; at < bytes.size(); at += 97) {
    bytes[at] ^= 0x10;
    CHECK(crc32c(0, bytes.data(), bytes.size()) != before);
    bytes[at] ^= 0x10;
  }
}

}  // namespace shoal
