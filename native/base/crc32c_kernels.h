// The implementations of crc32c(); only crc32c*.cc and the test that compares them include this.
//
// They work on the register itself: no inversion at the start and the end.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal {

inline constexpr uint32_t kCastagnoli = 0x82F63B78;

using Crc32cFn = uint32_t (*)(uint32_t crc, const std::byte* from, size_t n_bytes);

uint32_t crc32c_tables(uint32_t crc, const std::byte* from, size_t n_bytes);
// x86-64 only; the second needs VPCLMULQDQ as well.
uint32_t crc32c_sse42(uint32_t crc, const std::byte* from, size_t n_bytes);
uint32_t crc32c_avx512(uint32_t crc, const std::byte* from, size_t n_bytes);

}  // namespace shoal
