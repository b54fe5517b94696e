// float16 and bfloat16 in float32, for the kernel sources only (loops.h says why unnamed).
//
// Narrowing rounds to nearest, ties to even; a NaN stays a NaN, made quiet, its high payload bits
// kept: bit for bit as VCVTPS2PH and VCVTPH2PS do, so that every instruction set agrees.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace shoal {
namespace {

inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }

// Masks, NOT selects, around float operations: the compiler would move the operation under the
// condition and then find a branch that it cannot vectorise. For the same reason the masks come
// from a sign, NOT from a comparison; both numbers are below 2^31.
inline uint32_t all_ones_if_less(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<int32_t>(a - b) >> 31);
}
inline uint32_t chosen(uint32_t mask, uint32_t yes, uint32_t no) {
  return (yes & mask) | (no & ~mask);
}

// Tags; the bits travel as the low half of a uint32_t, the upper half 0.
struct Bfloat16 {};
struct Float16 {};

inline float widened(Bfloat16, uint32_t narrow) { return float_of(narrow << 16); }

inline uint32_t narrowed(Bfloat16, float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t quiet_nan = bits | 0x00400000;
  const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return (value != value ? quiet_nan : rounded) >> 16;
}

#if !defined(__F16C__)

// Source: F. Giesen, "Half to float done quick" (2012): a denormal is made by one exact float
// subtraction.
inline float widened(Float16, uint32_t narrow) {
  constexpr uint32_t kRebias = (127 - 15) << 23;
  constexpr uint32_t kDenormalRebias = kRebias + (1 << 23);
  constexpr uint32_t kInfinity = 0x0f800000;
  const uint32_t shifted = (narrow & 0x7fff) << 13;
  const uint32_t sign = (narrow & 0x8000) << 16;
  const uint32_t quiet = all_ones_if_less(kInfinity, shifted) & 0x00400000;
  const uint32_t beyond = ~all_ones_if_less(shifted, kInfinity) & kRebias;
  const uint32_t normal = (shifted + kRebias + beyond) | quiet;
  const uint32_t denormal =
      bits_of(float_of(shifted + kDenormalRebias) - float_of(kDenormalRebias));
  return float_of(sign | chosen(all_ones_if_less(shifted, 0x00800000), denormal, normal));
}

inline uint32_t narrowed(Float16, float value) {
  constexpr uint32_t kRebias = static_cast<uint32_t>(15 - 127) << 23;
  const uint32_t sign = (bits_of(value) >> 16) & 0x8000;
  const uint32_t bits = bits_of(value) & 0x7fffffff;
  // One unit in the last place of 0.5 is the smallest denormal: the addition does the rounding.
  const uint32_t denormal = bits_of(float_of(bits) + 0.5F) - bits_of(0.5F);
  const uint32_t payload = 0x200 | ((bits >> 13) & 0x3ff);
  const uint32_t special = 0x7c00 | (all_ones_if_less(0x7f800000, bits) & payload);
  // 65520 and up carry into infinity.
  const uint32_t normal = (bits + kRebias + 0xfff + ((bits >> 13) & 1)) >> 13;
  const uint32_t half = chosen(all_ones_if_less(bits, 0x38800000), denormal, normal);
  return sign | chosen(all_ones_if_less(bits, 0x47800000), half, special);
}

#elif defined(__AVX512F__)

typedef float Floats __attribute__((vector_size(64)));

// The masked forms with a full mask, the same instruction: g++ 12 warns that the scratch value in
// the plain ones is uninitialised (GCC PR 105593).
constexpr __mmask16 kAllLanes = 0xffff;

inline Floats widened_run(const std::byte* from) {
  __m256i narrow;
  __builtin_memcpy(&narrow, from, sizeof narrow);
  return (Floats)_mm512_maskz_cvtph_ps(kAllLanes, narrow);
}

inline void narrow_run(std::byte* into, Floats values) {
  const __m256i narrow =
      _mm512_maskz_cvtps_ph(kAllLanes, (__m512)values, _MM_FROUND_TO_NEAREST_INT);
  __builtin_memcpy(into, &narrow, sizeof narrow);
}

#else

typedef float Floats __attribute__((vector_size(32)));

inline Floats widened_run(const std::byte* from) {
  __m128i narrow;
  __builtin_memcpy(&narrow, from, sizeof narrow);
  return (Floats)_mm256_cvtph_ps(narrow);
}

inline void narrow_run(std::byte* into, Floats values) {
  const __m128i narrow = _mm256_cvtps_ph((__m256)values, _MM_FROUND_TO_NEAREST_INT);
  __builtin_memcpy(into, &narrow, sizeof narrow);
}

#endif

}  // namespace
}  // namespace shoal
