// What each codec must make of numbers, written out by hand: the one thing that a new codec adds to
// its contract suite, test_codec.cc.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "fold/codec.h"
#include "test/fold_truth.h"

namespace shoal::test {

using Floats = std::vector<float>;

struct CodecTruth {
  Codec codec;
  uint32_t keep;
  std::vector<std::byte> (*encode)(const Floats& elems);
  // Of any bytes, also those that no encoder writes.
  Floats (*decode)(const std::vector<std::byte>& encoded, size_t n_elems);
};

// The 16-bit floats: of two as near the even one; a NaN keeps its sign and upper bits, made quiet.

inline uint16_t narrow_bits(Format format, float value) {
  if (!std::isnan(value)) return bits_of(format, value);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t fraction = (bits & 0x7fffff) >> (23 - format.n_fraction_bits);
  const uint32_t quiet = 1u << (format.n_fraction_bits - 1);
  const uint32_t exponent = static_cast<uint32_t>(2 * format.bias + 1) << format.n_fraction_bits;
  return static_cast<uint16_t>((bits >> 31) << 15 | exponent | quiet | fraction);
}

// A NaN that is not quiet may be made so.
inline float wide_number(Format format, uint16_t bits) {
  const double number = number_of(format, bits);
  if (!std::isnan(number)) return static_cast<float>(number);
  const uint32_t fraction = bits & ((1u << format.n_fraction_bits) - 1);
  const uint32_t wide = static_cast<uint32_t>(bits >> 15) << 31 | 0x7f800000 |
                        fraction << (23 - format.n_fraction_bits);
  return get<float>(reinterpret_cast<const std::byte*>(&wide));
}

template <const Format& kFormat>
std::vector<std::byte> encode_16(const Floats& elems) {
  std::vector<std::byte> encoded(2 * elems.size());
  for (size_t i = 0; i < elems.size(); ++i) put(&encoded[2 * i], narrow_bits(kFormat, elems[i]));
  return encoded;
}

template <const Format& kFormat>
Floats decode_16(const std::vector<std::byte>& encoded, size_t n_elems) {
  Floats elems;
  for (size_t i = 0; i < n_elems; ++i)
    elems.push_back(wide_number(kFormat, get<uint16_t>(&encoded[2 * i])));
  return elems;
}

inline constexpr CodecTruth kCodecTruths[] = {
    {Codec::kBfloat16, 0, encode_16<kBrain>, decode_16<kBrain>},
    {Codec::kFloat16, 0, encode_16<kHalf>, decode_16<kHalf>},
};

}  // namespace shoal::test
