// The loops of the codecs, for the kernel sources only (see loops.h on why all is unnamed).
//
// NOT the instructions of AVX-512 BF16: VCVTNEPS2BF16 takes denormals for zero (Intel SDM, volume
// 2), so its bits are not those of other processors, and these loops wait for memory anyway.
#pragma once

#include "fold/codec.h"
#include "fold/half.h"
#include "fold/plain.h"

namespace shoal {
namespace {

inline void encode_bfloat16(std::byte* out, const std::byte* in, size_t n_elems) {
  auto* const into = reinterpret_cast<Plain<uint16_t>*>(out);
  const auto* const from = reinterpret_cast<const Plain<float>*>(in);
  SHOAL_INDEPENDENT
  for (size_t i = 0; i < n_elems; ++i)
    into[i].value = static_cast<uint16_t>(narrowed(Bfloat16{}, from[i].value));
}

inline void decode_bfloat16(std::byte* out, const std::byte* in, size_t n_elems) {
  auto* const into = reinterpret_cast<Plain<float>*>(out);
  const auto* const from = reinterpret_cast<const Plain<uint16_t>*>(in);
  SHOAL_INDEPENDENT
  for (size_t i = 0; i < n_elems; ++i) into[i].value = widened(Bfloat16{}, from[i].value);
}

inline void sum_bfloat16(std::byte* out, const std::byte* a, const std::byte* b, size_t n_elems) {
  auto* const into = reinterpret_cast<Plain<float>*>(out);
  const auto* const left = reinterpret_cast<const Plain<float>*>(a);
  const auto* const right = reinterpret_cast<const Plain<uint16_t>*>(b);
  SHOAL_INDEPENDENT
  for (size_t i = 0; i < n_elems; ++i)
    into[i].value = left[i].value + widened(Bfloat16{}, right[i].value);
}

inline void round_bfloat16(std::byte* data, size_t n_elems) {
  auto* const into = reinterpret_cast<Plain<float>*>(data);
  SHOAL_INDEPENDENT
  for (size_t i = 0; i < n_elems; ++i)
    into[i].value = widened(Bfloat16{}, narrowed(Bfloat16{}, into[i].value));
}

inline constexpr Narrow kBfloat16Sums = {sizeof(uint16_t), encode_bfloat16, decode_bfloat16,
                                         sum_bfloat16, round_bfloat16};

}  // namespace
}  // namespace shoal
