// The loops of the codecs without blocks, and the parts common to all codecs, for the kernel
// sources only (loops.h explains the unnamed namespace).
//
// NOT the instructions of AVX-512 BF16: VCVTNEPS2BF16 treats denormals as zero (Intel SDM, volume
// 2), so its bits differ from other processors', and these loops wait for memory anyway.
#pragma once

#include "fold/codec.h"
#include "fold/half.h"
#include "fold/plain.h"
#include "fold/random.h"

namespace shoal {
namespace {

using ConvertFn = void (*)(const Narrow&, std::byte* out, const std::byte* in, size_t n_elems);

// The elements that are converted at a time if one pass over them is not possible; they stay in the
// L1 cache. Whole blocks of every codec that is folded and rounded this way.
inline constexpr size_t kPieceElems = 1024;

// `Narrow::fold` by a codec's `decode`.
template <ConvertFn kDecode>
void sum_decoded(const Narrow& codec, std::byte* out, const std::byte* a, const std::byte* b,
                 size_t n_elems) {
  Plain<float> right[kPieceElems];
  auto* into = reinterpret_cast<Plain<float>*>(out);
  const auto* left = reinterpret_cast<const Plain<float>*>(a);
  const size_t n_piece_bytes = codec.bytes_of(codec, kPieceElems);
  for (; n_elems > 0; into += kPieceElems, left += kPieceElems, b += n_piece_bytes) {
    const size_t n = n_elems < kPieceElems ? n_elems : kPieceElems;
    kDecode(codec, reinterpret_cast<std::byte*>(right), b, n);
    SHOAL_INDEPENDENT
    for (size_t i = 0; i < n; ++i) into[i].value = left[i].value + right[i].value;
    n_elems -= n;
  }
}

// `Narrow::round` by a codec's `encode` and `decode`. No codec has more than five bytes an element.
template <ConvertFn kEncode, ConvertFn kDecode>
void round_by_encoding(const Narrow& codec, std::byte* data, size_t n_elems) {
  std::byte encoded[5 * kPieceElems];
  for (; n_elems > 0; data += kPieceElems * sizeof(float)) {
    const size_t n = n_elems < kPieceElems ? n_elems : kPieceElems;
    kEncode(codec, encoded, data, n);
    kDecode(codec, data, encoded, n);
    n_elems -= n;
  }
}

inline size_t two_bytes_each(const Narrow&, size_t n_elems) { return 2 * n_elems; }

// ---- bfloat16

inline void encode_bfloat16(const Narrow&, std::byte* out, const std::byte* in, size_t n_elems) {
  auto* const into = reinterpret_cast<Plain<uint16_t>*>(out);
  const auto* const from = reinterpret_cast<const Plain<float>*>(in);
  SHOAL_INDEPENDENT
  for (size_t i = 0; i < n_elems; ++i)
    into[i].value = static_cast<uint16_t>(narrowed(Bfloat16{}, from[i].value));
}

inline void decode_bfloat16(const Narrow&, std::byte* out, const std::byte* in, size_t n_elems) {
  auto* const into = reinterpret_cast<Plain<float>*>(out);
  const auto* const from = reinterpret_cast<const Plain<uint16_t>*>(in);
  SHOAL_INDEPENDENT
  for (size_t i = 0; i < n_elems; ++i) into[i].value = widened(Bfloat16{}, from[i].value);
}

inline void sum_bfloat16(const Narrow&, std::byte* out, const std::byte* a, const std::byte* b,
                         size_t n_elems) {
  auto* const into = reinterpret_cast<Plain<float>*>(out);
  const auto* const left = reinterpret_cast<const Plain<float>*>(a);
  const auto* const right = reinterpret_cast<const Plain<uint16_t>*>(b);
  SHOAL_INDEPENDENT
  for (size_t i = 0; i < n_elems; ++i)
    into[i].value = left[i].value + widened(Bfloat16{}, right[i].value);
}

inline void round_bfloat16(const Narrow&, std::byte* data, size_t n_elems) {
  auto* const into = reinterpret_cast<Plain<float>*>(data);
  SHOAL_INDEPENDENT
  for (size_t i = 0; i < n_elems; ++i)
    into[i].value = widened(Bfloat16{}, narrowed(Bfloat16{}, into[i].value));
}

inline void round_bfloat16_stochastic(const Narrow&, std::byte* data, size_t n_elems, uint64_t seed,
                                      uint64_t first) {
  auto* const into = reinterpret_cast<Plain<float>*>(data);
  const uint32_t salt = salt_of(seed);
  SHOAL_INDEPENDENT
  for (size_t i = 0; i < n_elems; ++i) {
    const float value = into[i].value;
    const uint32_t quiet_nan = bits_of(value) | 0x00400000;
    const uint32_t random = random_bits(salt, first + i) >> 16;
    const uint32_t rounded = value != value ? quiet_nan : bits_of(value) + random;
    into[i].value = float_of(rounded & 0xffff0000);
  }
}

inline constexpr Narrow kBfloat16Sums = {1,
                                         0,
                                         two_bytes_each,
                                         encode_bfloat16,
                                         decode_bfloat16,
                                         sum_bfloat16,
                                         round_bfloat16,
                                         round_bfloat16_stochastic};

// ---- float16

#if !defined(__F16C__)
inline void encode_float16(const Narrow&, std::byte* out, const std::byte* in, size_t n_elems) {
  auto* const into = reinterpret_cast<Plain<uint16_t>*>(out);
  const auto* const from = reinterpret_cast<const Plain<float>*>(in);
  SHOAL_INDEPENDENT
  for (size_t i = 0; i < n_elems; ++i)
    into[i].value = static_cast<uint16_t>(narrowed(Float16{}, from[i].value));
}

inline void decode_float16(const Narrow&, std::byte* out, const std::byte* in, size_t n_elems) {
  auto* const into = reinterpret_cast<Plain<float>*>(out);
  const auto* const from = reinterpret_cast<const Plain<uint16_t>*>(in);
  SHOAL_INDEPENDENT
  for (size_t i = 0; i < n_elems; ++i) into[i].value = widened(Float16{}, from[i].value);
}
#else
inline constexpr size_t kRunElems = sizeof(Floats) / sizeof(float);

inline void encode_float16(const Narrow&, std::byte* out, const std::byte* in, size_t n_elems) {
  Floats values;
  for (; n_elems >= kRunElems; n_elems -= kRunElems) {
    __builtin_memcpy(&values, in, sizeof values);
    narrow_run(out, values);
    in += sizeof values;
    out += sizeof values / 2;
  }
  if (n_elems == 0) return;
  std::byte rest[sizeof values / 2];
  values = Floats{};
  __builtin_memcpy(&values, in, 4 * n_elems);
  narrow_run(rest, values);
  __builtin_memcpy(out, rest, 2 * n_elems);
}

inline void decode_float16(const Narrow&, std::byte* out, const std::byte* in, size_t n_elems) {
  Floats values;
  for (; n_elems >= kRunElems; n_elems -= kRunElems) {
    values = widened_run(in);
    __builtin_memcpy(out, &values, sizeof values);
    in += sizeof values / 2;
    out += sizeof values;
  }
  if (n_elems == 0) return;
  std::byte rest[sizeof values / 2] = {};
  __builtin_memcpy(rest, in, 2 * n_elems);
  values = widened_run(rest);
  __builtin_memcpy(out, &values, 4 * n_elems);
}
#endif

// A float16 has the upper 10 of 23 fraction bits; below 2^-14 another one less for each power of
// two. Random bits are added to the bits below, and the carry rounds up. Below 2^-32 all numbers
// are rounded as multiples of 2^-55.
inline uint32_t float16_at_random(uint32_t bits, uint32_t random) {
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t exponent = magnitude >> 23;
  const uint32_t fraction = (magnitude & 0x7fffff) | 0x800000;
  const uint32_t wanted = exponent < 113 ? 126 - exponent : 13;
  const uint32_t shift = wanted < 31 ? wanted : 31;
  const uint32_t beyond = wanted - shift < 31 ? wanted - shift : 31;
  const uint32_t n_units = ((fraction >> beyond) + (random >> (32 - shift))) >> shift;
  const float small = static_cast<float>(static_cast<int32_t>(n_units)) * 0x1p-24F;
  const uint32_t normal = (magnitude + (random >> 19)) & 0xffffe000;
  const uint32_t finite = exponent < 113 ? bits_of(small) : normal;
  const uint32_t kept = finite < 0x47800000 ? finite : 0x7f800000;
  const uint32_t quiet = (magnitude & 0xffffe000) | 0x00400000;
  return (bits & 0x80000000) | (magnitude > 0x7f800000 ? quiet : kept);
}

inline void round_float16_stochastic(const Narrow&, std::byte* data, size_t n_elems, uint64_t seed,
                                     uint64_t first) {
  auto* const into = reinterpret_cast<Plain<uint32_t>*>(data);
  const uint32_t salt = salt_of(seed);
  SHOAL_INDEPENDENT
  for (size_t i = 0; i < n_elems; ++i)
    into[i].value = float16_at_random(into[i].value, random_bits(salt, first + i));
}

inline constexpr Narrow kFloat16Sums = {1,
                                        0,
                                        two_bytes_each,
                                        encode_float16,
                                        decode_float16,
                                        sum_decoded<decode_float16>,
                                        round_by_encoding<encode_float16, decode_float16>,
                                        round_float16_stochastic};

}  // namespace
}  // namespace shoal
