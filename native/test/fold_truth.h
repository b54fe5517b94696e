// The correct result of a fold or a division for one element, written out by hand; and inputs.
//
// Works on one element at a time: integers in 128 bits, float16 and bfloat16 as numbers (ldexp and
// nearbyint), never by the bit tricks of the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "fold/fold.h"

namespace shoal::test {

template <class T>
T get(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class T>
void put(std::byte* into, T value) {
  std::memcpy(into, &value, sizeof value);
}

// The 16-bit floats as numbers.

struct Format {
  int n_fraction_bits;
  int bias;
};
inline constexpr Format kHalf{10, 15};
inline constexpr Format kBrain{7, 127};

inline double number_of(Format format, uint16_t bits) {
  const int fraction = bits & ((1 << format.n_fraction_bits) - 1);
  const int exponent = (bits & 0x7fff) >> format.n_fraction_bits;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  const double one = std::ldexp(1.0, format.n_fraction_bits);
  if (exponent == 2 * format.bias + 1) return fraction == 0 ? sign * HUGE_VAL : NAN;
  if (exponent == 0) return sign * std::ldexp(fraction / one, 1 - format.bias);
  return sign * std::ldexp(1.0 + fraction / one, exponent - format.bias);
}

inline uint16_t bits_of(Format format, double number) {
  const uint16_t sign = std::signbit(number) ? 0x8000 : 0;
  const auto infinity = static_cast<uint16_t>((2 * format.bias + 1) << format.n_fraction_bits);
  if (std::isnan(number)) return infinity | 1;
  if (std::isinf(number)) return sign | infinity;
  if (number == 0) return sign;
  int exponent = 0;
  std::frexp(number, &exponent);  // number = 0.1... * 2^exponent
  exponent = std::max(exponent - 1, 1 - format.bias);
  const int unit = exponent - format.n_fraction_bits;
  const double n_units = std::nearbyint(std::ldexp(std::fabs(number), -unit));  // ties to even
  // A carry out of the fraction increments the exponent, up to infinity.
  const double steps = n_units + std::ldexp(exponent - (1 - format.bias), format.n_fraction_bits);
  return sign | (steps >= infinity ? infinity : static_cast<uint16_t>(steps));
}

// One element of each operation.

template <class T>
T folded_floats(FoldOp op, T a, T b) {
  switch (op) {
    case FoldOp::kSum:
    case FoldOp::kAvg:
      return a + b;
    case FoldOp::kProduct:
      return a * b;
    case FoldOp::kMin:
      if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
      return a < b ? a : b;
    case FoldOp::kMax:
      if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
      return a > b ? a : b;
    default:
      std::abort();
  }
}

template <class T>
T folded_integers(FoldOp op, T a, T b) {
  const auto wide_a = static_cast<unsigned __int128>(a);
  const auto wide_b = static_cast<unsigned __int128>(b);
  switch (op) {
    case FoldOp::kSum:
    case FoldOp::kAvg:
      return static_cast<T>(wide_a + wide_b);
    case FoldOp::kProduct:
      return static_cast<T>(wide_a * wide_b);
    case FoldOp::kMin:
      return a < b ? a : b;
    case FoldOp::kMax:
      return a > b ? a : b;
    case FoldOp::kBand:
      return static_cast<T>(wide_a & wide_b);
    case FoldOp::kBor:
      return static_cast<T>(wide_a | wide_b);
    case FoldOp::kBxor:
      return static_cast<T>(wide_a ^ wide_b);
  }
  std::abort();
}

inline uint8_t folded_bools(FoldOp op, bool a, bool b) {
  switch (op) {
    case FoldOp::kSum:
    case FoldOp::kMax:
    case FoldOp::kBor:
      return a || b ? 1 : 0;
    case FoldOp::kProduct:
    case FoldOp::kMin:
    case FoldOp::kBand:
      return a && b ? 1 : 0;
    case FoldOp::kBxor:
      return a != b ? 1 : 0;
    default:
      std::abort();
  }
}

template <class T>
void fold_complex(FoldOp op, std::byte* out, const std::byte* a, const std::byte* b) {
  const T a_re = get<T>(a);
  const T a_im = get<T>(a + sizeof(T));
  const T b_re = get<T>(b);
  const T b_im = get<T>(b + sizeof(T));
  if (op == FoldOp::kProduct) {
    put<T>(out, a_re * b_re - a_im * b_im);
    put<T>(out + sizeof(T), a_re * b_im + a_im * b_re);
  } else {
    put<T>(out, a_re + b_re);
    put<T>(out + sizeof(T), a_im + b_im);
  }
}

template <class T>
void fold_integer(FoldOp op, std::byte* out, const std::byte* a, const std::byte* b) {
  put(out, folded_integers(op, get<T>(a), get<T>(b)));
}

inline void fold_narrow(Format format, FoldOp op, std::byte* out, const std::byte* a,
                        const std::byte* b) {
  const auto wide_a = static_cast<float>(number_of(format, get<uint16_t>(a)));
  const auto wide_b = static_cast<float>(number_of(format, get<uint16_t>(b)));
  put(out, bits_of(format, folded_floats(op, wide_a, wide_b)));
}

inline void fold_one(DType dtype, FoldOp op, std::byte* out, const std::byte* a,
                     const std::byte* b) {
  switch (dtype) {
    case DType::kFloat32:
      return put(out, folded_floats(op, get<float>(a), get<float>(b)));
    case DType::kFloat64:
      return put(out, folded_floats(op, get<double>(a), get<double>(b)));
    case DType::kFloat16:
      return fold_narrow(kHalf, op, out, a, b);
    case DType::kBfloat16:
      return fold_narrow(kBrain, op, out, a, b);
    case DType::kInt8:
      return fold_integer<int8_t>(op, out, a, b);
    case DType::kInt16:
      return fold_integer<int16_t>(op, out, a, b);
    case DType::kInt32:
      return fold_integer<int32_t>(op, out, a, b);
    case DType::kInt64:
      return fold_integer<int64_t>(op, out, a, b);
    case DType::kUint8:
      return fold_integer<uint8_t>(op, out, a, b);
    case DType::kUint16:
      return fold_integer<uint16_t>(op, out, a, b);
    case DType::kUint32:
      return fold_integer<uint32_t>(op, out, a, b);
    case DType::kUint64:
      return fold_integer<uint64_t>(op, out, a, b);
    case DType::kBool:
      return put(out, folded_bools(op, get<uint8_t>(a) != 0, get<uint8_t>(b) != 0));
    case DType::kComplex64:
      return fold_complex<float>(op, out, a, b);
    case DType::kComplex128:
      return fold_complex<double>(op, out, a, b);
  }
}

template <class T>
void divide_integer(std::byte* data, uint32_t divisor) {
  put(data, static_cast<T>(static_cast<__int128>(get<T>(data)) / divisor));
}

inline void divide_narrow(Format format, std::byte* data, uint32_t divisor) {
  const auto wide = static_cast<float>(number_of(format, get<uint16_t>(data)));
  put(data, bits_of(format, wide / static_cast<float>(divisor)));
}

inline void divide_one(DType dtype, std::byte* data, uint32_t divisor) {
  switch (dtype) {
    case DType::kComplex64:
      put(data + 4, get<float>(data + 4) / static_cast<float>(divisor));
      [[fallthrough]];
    case DType::kFloat32:
      return put(data, get<float>(data) / static_cast<float>(divisor));
    case DType::kComplex128:
      put(data + 8, get<double>(data + 8) / divisor);
      [[fallthrough]];
    case DType::kFloat64:
      return put(data, get<double>(data) / divisor);
    case DType::kFloat16:
      return divide_narrow(kHalf, data, divisor);
    case DType::kBfloat16:
      return divide_narrow(kBrain, data, divisor);
    case DType::kInt8:
      return divide_integer<int8_t>(data, divisor);
    case DType::kInt16:
      return divide_integer<int16_t>(data, divisor);
    case DType::kInt32:
      return divide_integer<int32_t>(data, divisor);
    case DType::kInt64:
      return divide_integer<int64_t>(data, divisor);
    case DType::kUint8:
      return divide_integer<uint8_t>(data, divisor);
    case DType::kUint16:
      return divide_integer<uint16_t>(data, divisor);
    case DType::kUint32:
      return divide_integer<uint32_t>(data, divisor);
    case DType::kUint64:
      return divide_integer<uint64_t>(data, divisor);
    case DType::kBool:
      return;
  }
}

// Inputs and comparison.

inline uint64_t next_random(uint64_t& state) {  // splitmix64
  uint64_t mixed = state += 0x9E3779B97F4A7C15;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
  return mixed ^ (mixed >> 31);
}

// Bytes of one number (a complex has two), 0 for other than floats.
inline size_t float_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
    case DType::kComplex64:
      return 4;
    case DType::kFloat64:
    case DType::kComplex128:
      return 8;
    case DType::kFloat16:
    case DType::kBfloat16:
      return 2;
    default:
      return 0;
  }
}

inline bool is_nan_at(DType dtype, const std::byte* at) {
  switch (float_bytes(dtype)) {
    case 8:
      return std::isnan(get<double>(at));
    case 4:
      return std::isnan(get<float>(at));
    default:
      return std::isnan(number_of(dtype == DType::kFloat16 ? kHalf : kBrain, get<uint16_t>(at)));
  }
}

// Equal bits, or NaN on both sides, of any kind.
inline bool same(DType dtype, const std::byte* left, const std::byte* right, size_t n_elems) {
  const size_t n_bytes = n_elems * size_of(dtype);
  if (n_bytes == 0 || std::memcmp(left, right, n_bytes) == 0) return true;
  const size_t step = float_bytes(dtype);
  if (step == 0) return false;
  for (size_t at = 0; at < n_bytes; at += step) {
    if (std::memcmp(left + at, right + at, step) == 0) continue;
    if (!is_nan_at(dtype, left + at) || !is_nan_at(dtype, right + at)) return false;
  }
  return true;
}

inline void put_number(DType dtype, std::byte* into, double number) {
  switch (dtype) {
    case DType::kFloat16:
      return put(into, bits_of(kHalf, number));
    case DType::kBfloat16:
      return put(into, bits_of(kBrain, number));
    case DType::kFloat32:
    case DType::kComplex64:
      return put(into, static_cast<float>(number));
    default:
      return put(into, number);
  }
}

// A third random bits (NaN, denormals, all exponents), a third near each other (roundings, ties), a
// third special numbers.
inline void fill_floats(DType dtype, std::vector<std::byte>& bytes, size_t start, uint64_t& state) {
  constexpr double kInf = HUGE_VAL;
  const double special[] = {0.0,   -0.0,    1.0,     -1.0,   kInf,   -kInf,   NAN,     65504.0,
                            65520, 3.0e38,  -3.3e38, 6.0e-8, 6.1e-5, 1.2e-38, 1.0e-40, 1.00390625,
                            256.0, 1.7e308, 5e-324,  2049.0, 3.0e-5, -6.0e-8, 65519.0, 0.1};
  const size_t step = float_bytes(dtype);
  for (size_t at = start; at < bytes.size(); at += step) {
    const uint64_t random = next_random(state);
    if (random % 3 == 0) std::memcpy(&bytes[at], &state, step);
    if (random % 3 == 1) put_number(dtype, &bytes[at], static_cast<int>(random >> 48) / 256.0);
    if (random % 3 == 2) put_number(dtype, &bytes[at], special[(random >> 8) % 24]);
  }
}

// `n_elems` at `start` bytes from an aligned address; the buffer ends where they end.
inline std::vector<std::byte> input(DType dtype, size_t n_elems, size_t start, uint64_t seed) {
  std::vector<std::byte> bytes(start + n_elems * size_of(dtype));
  uint64_t state = seed + 1000 * static_cast<uint64_t>(dtype) + n_elems;
  if (float_bytes(dtype) != 0) {
    fill_floats(dtype, bytes, start, state);
    return bytes;
  }
  const uint64_t n_values = dtype == DType::kBool ? 3 : 256;  // for bool: 0, 1 and 2 (also true)
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(next_random(state) % n_values);
  return bytes;
}

}  // namespace shoal::test
