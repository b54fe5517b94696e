// The numbers that each codec must produce, written out by hand. A new codec adds only this to its
// contract suite, test_codec.cc.
#pragma once

#include <algorithm>
#include <array>
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
  double gap;  // the largest between neighbouring numbers, relative to the largest of a block
  std::vector<std::byte> (*encode)(const Floats& elems);
  // For any bytes, even those that no encoder writes.
  Floats (*decode)(const std::vector<std::byte>& encoded, size_t n_elems);
};

// The 16-bit floats: a tie goes to the even one; a NaN keeps its sign and upper bits, made quiet.

inline uint16_t narrow_bits(Format format, float value) {
  if (!std::isnan(value)) return bits_of(format, value);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t fraction = (bits & 0x7fffff) >> (23 - format.n_fraction_bits);
  const uint32_t quiet = 1u << (format.n_fraction_bits - 1);
  const uint32_t exponent = static_cast<uint32_t>(2 * format.bias + 1) << format.n_fraction_bits;
  return static_cast<uint16_t>((bits >> 31) << 15 | exponent | quiet | fraction);
}

// A signalling NaN may be made quiet.
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

// The Microscaling formats, from the text of OCP MX v1.0: an element is the nearest in the list of
// all magnitudes, of two equally near the one with the even code.

struct MxFormat {
  int n_bits;
  int top_exponent;  // of its largest power of two
  double (*magnitude)(int code);
  int n_magnitudes;
};
inline double magnitude_e4m3(int code) {
  return code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, code / 8 - 10);
}
inline double magnitude_int8(int code) { return code / 64.0; }
inline double magnitude_e2m1(int code) {
  return std::array{0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0}[static_cast<size_t>(code)];
}
inline constexpr MxFormat kE4m3{8, 8, magnitude_e4m3, 127};  // the code 127 is NaN
inline constexpr MxFormat kInt8{8, 0, magnitude_int8, 128};
inline constexpr MxFormat kE2m1{4, 2, magnitude_e2m1, 8};
inline constexpr size_t kMxBlock = 32;

inline unsigned nearest_code(const MxFormat& format, double scaled) {
  int best = 0;
  for (int code = 1; code < format.n_magnitudes; ++code) {
    const double further = std::fabs(format.magnitude(code) - std::fabs(scaled)) -
                           std::fabs(format.magnitude(best) - std::fabs(scaled));
    if (further < 0 || (further == 0 && code % 2 == 0)) best = code;
  }
  if (!std::signbit(scaled)) return static_cast<unsigned>(best);
  const int n_codes = 1 << format.n_bits;
  // int8 is two's complement, without -0; floats have a sign bit.
  const int negative = format.n_magnitudes == 128 ? (n_codes - best) % n_codes : n_codes / 2 + best;
  return static_cast<unsigned>(negative);
}

inline double code_value(const MxFormat& format, unsigned code) {
  const auto half = 1U << (format.n_bits - 1);
  if (format.n_magnitudes == 128) return static_cast<int8_t>(code) / 64.0;
  const auto magnitude = static_cast<int>(code % half);
  if (magnitude >= format.n_magnitudes) return NAN;
  return code < half ? format.magnitude(magnitude) : -format.magnitude(magnitude);
}

template <const MxFormat& kFormat>
std::vector<std::byte> encode_mx(const Floats& elems) {
  std::vector<std::byte> encoded;
  for (size_t first = 0; first < elems.size(); first += kMxBlock) {
    const size_t n = std::min(kMxBlock, elems.size() - first);
    double largest = 0;
    bool is_finite = true;
    for (size_t i = first; i < first + n; ++i) {
      largest = std::max(largest, std::fabs(double{elems[i]}));
      is_finite = is_finite && std::isfinite(elems[i]);
    }
    const int wanted = largest == 0 ? -127 : std::ilogb(largest) - kFormat.top_exponent;
    const int exponent = std::max(wanted, -127);
    encoded.push_back(static_cast<std::byte>(is_finite ? exponent + 127 : 255));
    const size_t start = encoded.size();
    encoded.resize(start + (n * static_cast<size_t>(kFormat.n_bits) + 7) / 8);
    for (size_t i = 0; is_finite && i < n; ++i) {
      const unsigned code = nearest_code(kFormat, std::ldexp(elems[first + i], -exponent));
      const size_t bit = i * static_cast<size_t>(kFormat.n_bits);
      encoded[start + bit / 8] |= static_cast<std::byte>(code << bit % 8);
    }
  }
  return encoded;
}

template <const MxFormat& kFormat>
Floats decode_mx(const std::vector<std::byte>& encoded, size_t n_elems) {
  const size_t n_bits = static_cast<size_t>(kFormat.n_bits);
  const size_t n_block_bytes = 1 + kMxBlock * n_bits / 8;
  Floats elems;
  for (size_t i = 0; i < n_elems; ++i) {
    const size_t block = i / kMxBlock * n_block_bytes, bit = i % kMxBlock * n_bits;
    const auto scale = static_cast<int>(encoded[block]);
    const auto byte = static_cast<unsigned>(encoded[block + 1 + bit / 8]);
    const double element = code_value(kFormat, (byte >> bit % 8) % (1U << n_bits));
    elems.push_back(scale == 255 ? NAN : static_cast<float>(std::ldexp(element, scale - 127)));
  }
  return elems;
}

// The largest elements of chunks of 4096: a 12-bit index and a value for each.

// The nearest of 0, 3/4 and 3/2; a tie goes to the lower. Codes: the sign, and whether it is 3/2.
inline double two_bits(double scaled) {
  const double magnitude = std::fabs(scaled);
  return std::copysign(magnitude > 1.125 ? 1.5 : magnitude > 0.375 ? 0.75 : 0.0, scaled);
}
inline double eight_bits(double scaled) { return code_value(kInt8, nearest_code(kInt8, scaled)); }

struct TopKFormat {
  size_t n_kept;  // of a whole chunk
  size_t n_bits;  // of a value
  size_t n_entries(size_t n_elems) const {
    return std::max<size_t>(1, (n_kept * n_elems + 4095) / 4096);
  }
  size_t values_at(size_t n_elems) const { return 1 + (n_entries(n_elems) * 12 + 7) / 8; }
  size_t n_bytes(size_t n_elems) const {
    return values_at(n_elems) + (n_entries(n_elems) * n_bits + 7) / 8;
  }
};

// `value` in the `n_bits` from bit `at` on, lowest first.
inline void put_bits(std::byte* into, size_t at, size_t n_bits, unsigned value) {
  for (size_t i = 0; i < n_bits; ++i)
    into[(at + i) / 8] |= static_cast<std::byte>((value >> i & 1) << (at + i) % 8);
}
inline unsigned get_bits(const std::byte* from, size_t at, size_t n_bits) {
  unsigned value = 0;
  for (size_t i = 0; i < n_bits; ++i)
    value |= (static_cast<unsigned>(from[(at + i) / 8]) >> (at + i) % 8 & 1) << i;
  return value;
}

inline std::vector<std::byte> encode_chunk(const TopKFormat& format, const Floats& elems) {
  const size_t n = format.n_entries(elems.size());
  std::vector<std::byte> encoded(format.n_bytes(elems.size()));
  std::vector<size_t> order(elems.size());
  bool is_finite = true;
  for (size_t i = 0; i < elems.size(); ++i) {
    order[i] = i;
    is_finite = is_finite && std::isfinite(elems[i]);
  }
  if (!is_finite) {
    encoded[0] = std::byte{255};
    return encoded;
  }
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return std::fabs(elems[a]) > std::fabs(elems[b]); });
  const double largest = std::fabs(elems[order[0]]);
  if (largest < std::ldexp(1.5, -98)) return encoded;
  const int exponent = std::ilogb(largest);
  encoded[0] = static_cast<std::byte>(exponent + 127);
  const auto rounded = [&](size_t i) {
    const double scaled = std::ldexp(elems[i], -exponent);
    return format.n_bits == 2 ? two_bits(scaled) : eight_bits(scaled);
  };
  order.resize(std::min(n, order.size()));
  while (rounded(order.back()) == 0) order.pop_back();
  std::sort(order.begin(), order.end());
  while (order.size() < n) order.push_back(order.back());
  for (size_t i = 0; i < n; ++i) {
    const double value = rounded(order[i]);
    const unsigned upper = std::fabs(value) == 1.5 ? 1 : 0;
    const unsigned code =
        format.n_bits == 8 ? nearest_code(kInt8, value) : (value < 0 ? 2 : 0) + upper;
    put_bits(&encoded[1], 12 * i, 12, static_cast<unsigned>(order[i]));
    put_bits(&encoded[format.values_at(elems.size())], format.n_bits * i, format.n_bits, code);
  }
  return encoded;
}

inline Floats decode_chunk(const TopKFormat& format, const std::byte* encoded, size_t n_elems) {
  const auto scale = static_cast<int>(encoded[0]);
  Floats elems(n_elems, scale == 255 ? NAN : 0.0F);
  if (scale == 255 || scale < 29) return elems;
  int before = -1;
  for (size_t i = 0; i < format.n_entries(n_elems); ++i) {
    const auto index = static_cast<int>(get_bits(encoded + 1, 12 * i, 12));
    if (index <= before || static_cast<size_t>(index) >= n_elems) continue;
    before = index;
    const unsigned code =
        get_bits(encoded + format.values_at(n_elems), format.n_bits * i, format.n_bits);
    const double two = (code & 1 ? 1.5 : 0.75) * (code & 2 ? -1 : 1);
    const double value = format.n_bits == 8 ? code_value(kInt8, code) : two;
    elems[static_cast<size_t>(index)] = static_cast<float>(std::ldexp(value, scale - 127));
  }
  return elems;
}

template <size_t kKept, size_t kBits>
std::vector<std::byte> encode_top_k(const Floats& elems) {
  std::vector<std::byte> encoded;
  for (size_t first = 0; first < elems.size(); first += 4096) {
    const size_t end = std::min(first + 4096, elems.size());
    const Floats chunk(&elems[first], &elems[first] + (end - first));
    for (const std::byte byte : encode_chunk({kKept, kBits}, chunk)) encoded.push_back(byte);
  }
  return encoded;
}

template <size_t kKept, size_t kBits>
Floats decode_top_k(const std::vector<std::byte>& encoded, size_t n_elems) {
  const TopKFormat format{kKept, kBits};
  Floats elems;
  for (size_t at = 0; elems.size() < n_elems; at += format.n_bytes(4096)) {
    const size_t n = std::min<size_t>(4096, n_elems - elems.size());
    for (const float elem : decode_chunk(format, &encoded[at], n)) elems.push_back(elem);
  }
  return elems;
}

inline constexpr CodecTruth kCodecTruths[] = {
    {Codec::kBfloat16, 0, 0x1p-8, encode_16<kBrain>, decode_16<kBrain>},
    {Codec::kFloat16, 0, 0x1p-11, encode_16<kHalf>, decode_16<kHalf>},
    {Codec::kMxFp8, 0, 1.0 / 7, encode_mx<kE4m3>, decode_mx<kE4m3>},
    {Codec::kMxInt8, 0, 0x1p-6, encode_mx<kInt8>, decode_mx<kInt8>},
    {Codec::kMxFp4, 0, 0.5, encode_mx<kE2m1>, decode_mx<kE2m1>},
    {Codec::kTopK8, 41, 0, encode_top_k<41, 8>, decode_top_k<41, 8>},
    {Codec::kTopK8, 4096, 0, encode_top_k<4096, 8>, decode_top_k<4096, 8>},
    {Codec::kTopK2, 1, 0, encode_top_k<1, 2>, decode_top_k<1, 2>},
    {Codec::kTopK2, 130, 0, encode_top_k<130, 2>, decode_top_k<130, 2>},
};

}  // namespace shoal::test
