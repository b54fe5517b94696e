// CRC-32C by carry-less multiplication, 256 bytes at a time.
//
// Four registers of 64 bytes hold the remainder of the bytes read so far. Each is carried over the
// next 256 bytes by two multiplications with x^n mod P, and the bytes there are added. At the end
// they are joined to 16 bytes, which the SSE4.2 instruction takes like any others.
// On 128 KiB in the cache this is about three times as fast as crc32c_sse42().
// Source: V. Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction", Intel 2009 (in the reflected form). NOTHING of std that emits code is called here:
// see fold/loops.h.

#include <immintrin.h>

#include "base/crc32c_kernels.h"

namespace shoal {
namespace {

constexpr size_t kBlock = 256;

// x^n mod P, with its bits in register order, shifted up by one as the product needs it.
constexpr uint64_t power(size_t n) {
  uint32_t bits = 0x80000000U;
  for (size_t i = 0; i < n; ++i) bits = (bits >> 1) ^ ((bits & 1) * kCastagnoli);
  return uint64_t{bits} << 1;
}

// The factors that carry 128 bits over `n_bits`: for the lower half, and for the upper one.
template <size_t n_bits>
struct Over {
  static constexpr auto kLower = static_cast<long long>(power(n_bits + 32));
  static constexpr auto kUpper = static_cast<long long>(power(n_bits - 32));
};

template <size_t n_bits>
__m512i carried(__m512i value, __m512i onto) {
  const __m512i by = _mm512_set_epi64(
      Over<n_bits>::kUpper, Over<n_bits>::kLower, Over<n_bits>::kUpper, Over<n_bits>::kLower,
      Over<n_bits>::kUpper, Over<n_bits>::kLower, Over<n_bits>::kUpper, Over<n_bits>::kLower);
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(value, by, 0x00),
                                   _mm512_clmulepi64_epi128(value, by, 0x11), onto, kXorOfThree);
}

template <size_t n_bits>
__m128i carried(__m128i value, __m128i onto) {
  const __m128i by = _mm_set_epi64x(Over<n_bits>::kUpper, Over<n_bits>::kLower);
  return _mm_xor_si128(onto, _mm_xor_si128(_mm_clmulepi64_si128(value, by, 0x00),
                                           _mm_clmulepi64_si128(value, by, 0x11)));
}

__m512i load(const std::byte* from) { return _mm512_loadu_si512(from); }

// Prefetch, because the hardware stops at every page: 92 instead of 74 GB/s from the L2 cache.
void prefetch_block(const std::byte* from) {
  constexpr size_t kAhead = 2048, kLine = 64;
  for (size_t at = 0; at < kBlock; at += kLine)
    _mm_prefetch(reinterpret_cast<const char*>(from) + kAhead + at, _MM_HINT_T0);
}

}  // namespace

uint32_t crc32c_avx512(uint32_t crc, const std::byte* from, size_t n_bytes) {
  if (n_bytes < 2 * kBlock) return crc32c_sse42(crc, from, n_bytes);
  __m512i a = _mm512_xor_si512(load(from),
                               _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(crc))));
  __m512i b = load(from + 64), c = load(from + 128), d = load(from + 192);
  for (from += kBlock, n_bytes -= kBlock; n_bytes >= kBlock; from += kBlock, n_bytes -= kBlock) {
    prefetch_block(from);
    a = carried<8 * kBlock>(a, load(from));
    b = carried<8 * kBlock>(b, load(from + 64));
    c = carried<8 * kBlock>(c, load(from + 128));
    d = carried<8 * kBlock>(d, load(from + 192));
  }
  d = carried<512>(carried<512>(carried<512>(a, b), c), d);
  alignas(64) __m128i lanes[4];
  _mm512_store_si512(lanes, d);
  const __m128i last =
      carried<384>(lanes[0], carried<256>(lanes[1], carried<128>(lanes[2], lanes[3])));
  alignas(16) std::byte joined[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(joined), last);
  return crc32c_sse42(crc32c_sse42(0, joined, sizeof(joined)), from, n_bytes);
}

}  // namespace shoal
