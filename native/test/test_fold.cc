// Every fold on every instruction set of this machine, against a truth written out by hand below.
//
// The truth works on one element at a time: integers in 128 bits, float16 and bfloat16 as numbers
// (ldexp and nearbyint), never by the bit tricks of the kernels.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "fold/fold.h"
#include "fold/kernels.h"
#include "test/check.h"

namespace shoal {
namespace {

using Bytes = std::vector<std::byte>;

constexpr size_t kLengths[] = {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 63, 64, 65, 1000, 4097};

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
constexpr Format kHalf{10, 15};
constexpr Format kBrain{7, 127};

double number_of(Format format, uint16_t bits) {
  const int fraction = bits & ((1 << format.n_fraction_bits) - 1);
  const int exponent = (bits & 0x7fff) >> format.n_fraction_bits;
  const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
  const double one = std::ldexp(1.0, format.n_fraction_bits);
  if (exponent == 2 * format.bias + 1) return fraction == 0 ? sign * HUGE_VAL : NAN;
  if (exponent == 0) return sign * std::ldexp(fraction / one, 1 - format.bias);
  return sign * std::ldexp(1.0 + fraction / one, exponent - format.bias);
}

uint16_t bits_of(Format format, double number) {
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
  // A carry out of the fraction goes on into the exponent, up to infinity.
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

uint8_t folded_bools(FoldOp op, bool a, bool b) {
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

void fold_narrow(Format format, FoldOp op, std::byte* out, const std::byte* a, const std::byte* b) {
  const auto wide_a = static_cast<float>(number_of(format, get<uint16_t>(a)));
  const auto wide_b = static_cast<float>(number_of(format, get<uint16_t>(b)));
  put(out, bits_of(format, folded_floats(op, wide_a, wide_b)));
}

void fold_one(DType dtype, FoldOp op, std::byte* out, const std::byte* a, const std::byte* b) {
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

void divide_narrow(Format format, std::byte* data, uint32_t divisor) {
  const auto wide = static_cast<float>(number_of(format, get<uint16_t>(data)));
  put(data, bits_of(format, wide / static_cast<float>(divisor)));
}

void divide_one(DType dtype, std::byte* data, uint32_t divisor) {
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

uint64_t next_random(uint64_t& state) {  // splitmix64
  uint64_t mixed = state += 0x9E3779B97F4A7C15;
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB;
  return mixed ^ (mixed >> 31);
}

// Bytes of one number (a complex has two), 0 for what is no float.
size_t float_bytes(DType dtype) {
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

bool is_nan_at(DType dtype, const std::byte* at) {
  switch (float_bytes(dtype)) {
    case 8:
      return std::isnan(get<double>(at));
    case 4:
      return std::isnan(get<float>(at));
    default:
      return std::isnan(number_of(dtype == DType::kFloat16 ? kHalf : kBrain, get<uint16_t>(at)));
  }
}

// Equal bits, or NaN on both sides: which NaN is left open.
bool same(DType dtype, const std::byte* left, const std::byte* right, size_t n_elems) {
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

void put_number(DType dtype, std::byte* into, double number) {
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

// A third any bits (NaN, denormals, all exponents), a third near each other (roundings, ties), a
// third special numbers.
void fill_floats(DType dtype, Bytes& bytes, size_t start, uint64_t& state) {
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
Bytes input(DType dtype, size_t n_elems, size_t start, uint64_t seed) {
  Bytes bytes(start + n_elems * size_of(dtype));
  uint64_t state = seed + 1000 * static_cast<uint64_t>(dtype) + n_elems;
  if (float_bytes(dtype) != 0) {
    fill_floats(dtype, bytes, start, state);
    return bytes;
  }
  const uint64_t n_values = dtype == DType::kBool ? 3 : 256;  // of a bool: 0, 1, and 2 is true too
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(next_random(state) % n_values);
  return bytes;
}

std::string name(const Kernels* kernels, DType dtype, FoldOp op, size_t n_elems) {
  return std::string(kernels->isa) + " " + name_of(dtype) + " " + name_of(op) + " of " +
         std::to_string(n_elems);
}

void check_fold(DType dtype, FoldOp op, size_t n_elems, size_t start) {
  const size_t n_bytes = n_elems * size_of(dtype);
  const Bytes a = input(dtype, n_elems, start, 1);
  const Bytes b = input(dtype, n_elems, 2 * start, 2);
  Bytes truth(n_bytes);
  for (size_t at = 0; at < n_bytes; at += size_of(dtype)) {
    fold_one(dtype, op, &truth[at], &a[start + at], &b[2 * start + at]);
  }
  for (const Kernels* kernels : kernels_here()) {
    const FoldFn fold = kernels->fold[static_cast<size_t>(dtype)][static_cast<size_t>(op)];
    constexpr size_t kGuard = 80;
    Bytes out(start + n_bytes + kGuard, std::byte{0xA5});
    fold(out.data() + start, a.data() + start, b.data() + 2 * start, n_elems);
    bool right = same(dtype, out.data() + start, truth.data(), n_elems);
    for (size_t i = 0; i < kGuard; ++i) right &= out[start + n_bytes + i] == std::byte{0xA5};
    if (!right) test::fail(__FILE__, __LINE__, name(kernels, dtype, op, n_elems));

    Bytes in_place = a;
    fold(in_place.data() + start, in_place.data() + start, b.data() + 2 * start, n_elems);
    right = same(dtype, in_place.data() + start, truth.data(), n_elems);
    if (!right) test::fail(__FILE__, __LINE__, "in place: " + name(kernels, dtype, op, n_elems));
  }
}

template <class T>
T fold_pair(const Kernels* kernels, DType dtype, FoldOp op, T a, T b) {
  std::byte out[16];
  std::byte left[16];
  std::byte right[16];
  put(left, a);
  put(right, b);
  kernels->fold[static_cast<size_t>(dtype)][static_cast<size_t>(op)](out, left, right, 1);
  return get<T>(out);
}

constexpr uint32_t kDivisors[] = {1, 2, 3, 7, 16, 300, 65537, 4294967295U};

}  // namespace

TEST("every fold equals the truth at every length and start, in place and not") {
  for (size_t dtype = 0; dtype < kDTypes; ++dtype) {
    for (size_t op = 0; op < kFoldOps; ++op) {
      if (fold_function(DType(dtype), FoldOp(op)) == nullptr) continue;
      const size_t elem = size_of(DType(dtype));
      for (const size_t n_elems : kLengths) {
        for (const size_t start : {size_t{0}, elem, 3 * elem, size_t{1}}) {
          check_fold(DType(dtype), FoldOp(op), n_elems, start);
        }
      }
    }
  }
}

TEST("a pair without a meaning has no fold, on any instruction set") {
  for (const Kernels* kernels : kernels_here()) {
    for (size_t dtype = 0; dtype < kDTypes; ++dtype) {
      for (size_t op = 0; op < kFoldOps; ++op) {
        const bool is_float = float_bytes(DType(dtype)) != 0;
        const bool is_complex =
            DType(dtype) == DType::kComplex64 || DType(dtype) == DType::kComplex128;
        const bool bitwise = op >= size_t(FoldOp::kBand);
        const bool ordered = FoldOp(op) == FoldOp::kMin || FoldOp(op) == FoldOp::kMax;
        const bool mean_of_bool = DType(dtype) == DType::kBool && FoldOp(op) == FoldOp::kAvg;
        const bool absent = (is_float && bitwise) || (is_complex && ordered) || mean_of_bool;
        CHECK_EQ(kernels->fold[dtype][op] == nullptr, absent);
      }
    }
  }
}

TEST("a number that names nothing has no fold, no size and no name") {
  CHECK(fold_function(DType(15), FoldOp::kSum) == nullptr);
  CHECK(fold_function(DType::kFloat32, FoldOp(8)) == nullptr);
  CHECK(!is_dtype(15) && is_dtype(14) && !is_fold_op(8) && is_fold_op(7));
  CHECK_EQ(size_of(DType(15)), 0);
  CHECK_EQ(std::string_view(name_of(DType(255))), "?");
  CHECK_EQ(std::string_view(name_of(FoldOp(8))), "?");
}

TEST("sizes and names follow the numbers") {
  constexpr size_t kSizes[] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 1, 8, 16, 2, 4, 8};
  for (size_t dtype = 0; dtype < kDTypes; ++dtype) CHECK_EQ(size_of(DType(dtype)), kSizes[dtype]);
  CHECK_EQ(std::string_view(name_of(DType::kBfloat16)), "bfloat16");
  CHECK_EQ(std::string_view(name_of(DType::kUint64)), "uint64");
  CHECK_EQ(std::string_view(name_of(FoldOp::kBxor)), "bxor");
}

TEST("integer sums and products wrap") {
  for (const Kernels* kernels : kernels_here()) {
    CHECK_EQ(fold_pair<int8_t>(kernels, DType::kInt8, FoldOp::kSum, 127, 1), -128);
    CHECK_EQ(fold_pair<int32_t>(kernels, DType::kInt32, FoldOp::kSum, INT32_MIN, -1), INT32_MAX);
    CHECK_EQ(fold_pair<int64_t>(kernels, DType::kInt64, FoldOp::kProduct, INT64_MIN, -1),
             INT64_MIN);
    CHECK_EQ(fold_pair<uint16_t>(kernels, DType::kUint16, FoldOp::kProduct, 65535, 65535), 1);
    CHECK_EQ(fold_pair<uint64_t>(kernels, DType::kUint64, FoldOp::kMax, UINT64_MAX, 1), UINT64_MAX);
  }
}

TEST("min and max give NaN if either side is NaN and the right side of equal zeros") {
  for (const Kernels* kernels : kernels_here()) {
    for (const FoldOp op : {FoldOp::kMin, FoldOp::kMax}) {
      CHECK(std::isnan(fold_pair<float>(kernels, DType::kFloat32, op, NAN, 1)));
      CHECK(std::isnan(fold_pair<float>(kernels, DType::kFloat32, op, 1, NAN)));
      CHECK(std::isnan(fold_pair<double>(kernels, DType::kFloat64, op, HUGE_VAL, NAN)));
      CHECK(std::signbit(fold_pair<double>(kernels, DType::kFloat64, op, 0.0, -0.0)));
      CHECK(!std::signbit(fold_pair<float>(kernels, DType::kFloat32, op, -0.0F, 0.0F)));
      CHECK_EQ(fold_pair<uint16_t>(kernels, DType::kFloat16, op, 0x7d01, 0x3c00), 0x7f01);
    }
  }
}

TEST("bfloat16 rounds ties to even, overflows to infinity and keeps NaN") {
  const auto sum = [](const Kernels* kernels, uint16_t a, uint16_t b) {
    return fold_pair<uint16_t>(kernels, DType::kBfloat16, FoldOp::kSum, a, b);
  };
  for (const Kernels* kernels : kernels_here()) {
    CHECK_EQ(sum(kernels, 0x3f80, 0x3b80), 0x3f80);  // 1 + 2^-8: tie, down to even
    CHECK_EQ(sum(kernels, 0x3f81, 0x3b80), 0x3f82);  // 1 + 2^-7 + 2^-8: tie, up to even
    CHECK_EQ(sum(kernels, 0x3f80, 0x3b81), 0x3f81);  // just above the tie
    CHECK_EQ(sum(kernels, 0x7f7f, 0x7f7f), 0x7f80);
    CHECK_EQ(sum(kernels, 0x7f7f, 0x7b00), 0x7f80);  // the tie above the largest number
    CHECK_EQ(sum(kernels, 0x0001, 0x0001), 0x0002);  // denormals are not flushed
    CHECK_EQ(sum(kernels, 0x8000, 0x8000), 0x8000);
    CHECK_EQ(sum(kernels, 0x7f81, 0x3f80), 0x7fc1);  // a NaN by its lowest bit only
  }
}

TEST("float16 rounds ties to even, overflows at 65520 and makes denormals") {
  const auto fold = [](const Kernels* kernels, FoldOp op, uint16_t a, uint16_t b) {
    return fold_pair<uint16_t>(kernels, DType::kFloat16, op, a, b);
  };
  for (const Kernels* kernels : kernels_here()) {
    CHECK_EQ(fold(kernels, FoldOp::kSum, 0x6800, 0x3c00), 0x6800);  // 2048 + 1
    CHECK_EQ(fold(kernels, FoldOp::kSum, 0x6801, 0x3c00), 0x6802);  // 2050 + 1
    CHECK_EQ(fold(kernels, FoldOp::kSum, 0x7bff, 0x4b80), 0x7bff);  // 65504 + 15
    CHECK_EQ(fold(kernels, FoldOp::kSum, 0x7bff, 0x4c00), 0x7c00);  // 65504 + 16
    CHECK_EQ(fold(kernels, FoldOp::kSum, 0x0001, 0x03ff), 0x0400);
    CHECK_EQ(fold(kernels, FoldOp::kProduct, 0x0001, 0x3800), 0x0000);  // half the smallest: tie
    CHECK_EQ(fold(kernels, FoldOp::kProduct, 0x0003, 0x3800), 0x0002);
    CHECK_EQ(fold(kernels, FoldOp::kSum, 0xfc00, 0x7c00) & 0x7e00, 0x7e00);  // inf - inf
  }
}

TEST("every float16 and bfloat16 survives the way through float32") {
  std::vector<uint16_t> all(65536);
  for (size_t bits = 0; bits < all.size(); ++bits) all[bits] = static_cast<uint16_t>(bits);
  const std::vector<uint16_t> minus_zeros(all.size(), 0x8000);
  const auto* a = reinterpret_cast<const std::byte*>(all.data());
  const auto* b = reinterpret_cast<const std::byte*>(minus_zeros.data());
  for (const DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    for (const Kernels* kernels : kernels_here()) {
      Bytes out(2 * all.size());
      kernels->fold[size_t(dtype)][size_t(FoldOp::kSum)](out.data(), a, b, all.size());
      CHECK(same(dtype, out.data(), a, all.size()));
    }
  }
}

TEST("divide equals the truth for every dtype and divisor") {
  for (size_t dtype = 0; dtype < kDTypes; ++dtype) {
    for (const uint32_t divisor : kDivisors) {
      for (const size_t n_elems : {0, 1, 5, 17, 1000}) {
        const size_t start = n_elems % 2;
        Bytes truth = input(DType(dtype), n_elems, start, divisor);
        const Bytes data = truth;
        const size_t elem = size_of(DType(dtype));
        for (size_t i = 0; i < n_elems; ++i) {
          divide_one(DType(dtype), truth.data() + start + i * elem, divisor);
        }
        for (const Kernels* kernels : kernels_here()) {
          Bytes out = data;
          if (kernels->divide[dtype] == nullptr) continue;
          kernels->divide[dtype](out.data() + start, n_elems, divisor);
          CHECK(same(DType(dtype), out.data() + start, truth.data() + start, n_elems));
        }
      }
    }
  }
}

TEST("divide truncates integers toward zero and leaves bool as it is") {
  int32_t numbers[] = {-7, 7, INT32_MIN, INT32_MAX, 5};
  divide(DType::kInt32, reinterpret_cast<std::byte*>(numbers), 5, 2);
  CHECK_EQ(numbers[0], -3);
  CHECK_EQ(numbers[1], 3);
  CHECK_EQ(numbers[2], INT32_MIN / 2);
  CHECK_EQ(numbers[3], INT32_MAX / 2);
  uint8_t yes = 1;
  divide(DType::kBool, reinterpret_cast<std::byte*>(&yes), 1, 3);
  CHECK_EQ(yes, 1);
}

TEST("divide is a true division, not a product with the reciprocal") {
  // 49 * (1 / 49) is not 1 in float64, and many of these differ in float32.
  for (const Kernels* kernels : kernels_here()) {
    for (int i = 1; i < 1000; ++i) {
      float single = static_cast<float>(i);
      double twice = i;
      kernels->divide[size_t(DType::kFloat32)](reinterpret_cast<std::byte*>(&single), 1, 49);
      kernels->divide[size_t(DType::kFloat64)](reinterpret_cast<std::byte*>(&twice), 1, 49);
      CHECK_EQ(single, static_cast<float>(i) / 49.0F);
      CHECK_EQ(twice, i / 49.0);
    }
  }
}

TEST("scale multiplies floats and complex and refuses the others") {
  for (size_t dtype = 0; dtype < kDTypes; ++dtype) {
    const Bytes data = input(DType(dtype), 37, 0, 9);
    const size_t step = float_bytes(DType(dtype));
    Bytes out = data;
    CHECK_EQ(scale(DType(dtype), out.data(), 37, 0.3), step != 0);
    if (step == 0) CHECK(out == data);
    Bytes truth = data;
    for (size_t at = 0; step != 0 && at < truth.size(); at += step) {
      if (step == 8) put(&truth[at], get<double>(&data[at]) * 0.3);
      if (step == 4) put(&truth[at], get<float>(&data[at]) * 0.3F);
      if (step != 2) continue;
      const Format format = DType(dtype) == DType::kFloat16 ? kHalf : kBrain;
      const auto wide = static_cast<float>(number_of(format, get<uint16_t>(&data[at])));
      put(&truth[at], bits_of(format, wide * 0.3F));
    }
    CHECK(same(DType(dtype), out.data(), truth.data(), 37));
    for (const Kernels* kernels : kernels_here()) {
      if (step == 0) continue;
      out = data;
      kernels->scale[dtype](out.data(), 37, 0.3);
      CHECK(same(DType(dtype), out.data(), truth.data(), 37));
    }
  }
}

TEST("the instruction set in use is the one asked for, else the best") {
  const char* const wanted = std::getenv("SHOAL_ISA");
  std::string_view expected = kernels_here().back()->isa;
  for (const Kernels* kernels : kernels_here()) {
    if (wanted != nullptr && std::string_view(wanted) == kernels->isa) expected = wanted;
  }
  CHECK_EQ(std::string_view(fold_isa()), expected);
  CHECK(std::string_view(kernels_here().front()->isa) == "baseline");
}

}  // namespace shoal
