// The fold kernels, written once; each fold_<isa>.cc compiles them again with its own flags.
//
// Everything is in an unnamed namespace, and NOTHING of std that emits code is called: the linker
// keeps one copy of an inline function, and that could be the avx512 one, for CPUs without it. The
// compiler vectorises the loops (float16 alone needs intrinsics, half.h); no -ffast-math and no
// contraction, so that every instruction set rounds the same way.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fold/half.h"
#include "fold/kernels.h"
#include "fold/mx_loops.h"
#include "fold/narrow_loops.h"
#include "fold/plain.h"
#include "fold/top_k_loops.h"

namespace shoal {
namespace {

// Operations: on numbers, and on vectors of floats for float16.

// uint16_t * uint16_t is an int and may overflow it; the other types stay as they are.
template <class T>
inline constexpr bool kPromotes = sizeof(T) < sizeof(int);

struct Sum {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>(a + b);
  }
};
struct Product {
  template <class T>
  static T of(T a, T b) {
    if constexpr (kPromotes<T>) {
      return static_cast<T>(1U * a * b);
    } else {
      return a * b;
    }
  }
};
struct Quotient {
  template <class T>
  static T of(T a, T b) {
    return a / b;
  }
};
// One condition, NOT two nested ones: the compiler may not evaluate a comparison that could trap on
// NaN ahead of another, and would not vectorise.
struct Min {
  template <class T>
  static T of(T a, T b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};
struct Max {
  template <class T>
  static T of(T a, T b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};
struct Band {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>(a & b);
  }
};
struct Bor {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>(a | b);
  }
};
struct Bxor {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>(a ^ b);
  }
};
struct Both {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>((a != 0) & (b != 0));
  }
};
struct Either {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>((a | b) != 0);
  }
};
struct OneOf {
  template <class T>
  static T of(T a, T b) {
    return static_cast<T>((a != 0) != (b != 0));
  }
};

// Loops.

template <class T, class Op>
struct Loop {
  using Number = T;

  static void fold(std::byte* out, const std::byte* a, const std::byte* b, size_t n_elems) {
    auto* const into = reinterpret_cast<Plain<T>*>(out);
    const auto* const left = reinterpret_cast<const Plain<T>*>(a);
    const auto* const right = reinterpret_cast<const Plain<T>*>(b);
    SHOAL_INDEPENDENT
    for (size_t i = 0; i < n_elems; ++i) into[i].value = Op::of(left[i].value, right[i].value);
  }

  static void with_one(std::byte* data, size_t n_elems, T right) {
    auto* const into = reinterpret_cast<Plain<T>*>(data);
    SHOAL_INDEPENDENT
    for (size_t i = 0; i < n_elems; ++i) into[i].value = Op::of(into[i].value, right);
  }
};

// 16-bit floats two at a time: the halves of a 32-bit word are shifted out and back in. NO lane
// crosses a vector, which costs the compiler's own widening half its speed.
template <class Narrow, class Op>
struct PairLoop {
  using Number = float;

  static uint32_t of_pair(uint32_t a, uint32_t b) {
    return of_one(a & 0xffff, b & 0xffff) | of_one(a >> 16, b >> 16) << 16;
  }
  static uint32_t of_one(uint32_t a, uint32_t b) {
    return narrowed(Narrow{}, Op::of(widened(Narrow{}, a), widened(Narrow{}, b)));
  }

  static void fold(std::byte* out, const std::byte* a, const std::byte* b, size_t n_elems) {
    auto* const into = reinterpret_cast<Plain<uint32_t>*>(out);
    const auto* const left = reinterpret_cast<const Plain<uint32_t>*>(a);
    const auto* const right = reinterpret_cast<const Plain<uint32_t>*>(b);
    const size_t n_pairs = n_elems / 2;
    SHOAL_INDEPENDENT
    for (size_t i = 0; i < n_pairs; ++i) {
      into[i].value = of_pair(left[i].value, right[i].value);
    }
    if (n_elems % 2 == 0) return;
    const size_t last = n_elems - 1;
    reinterpret_cast<Plain<uint16_t>*>(out)[last].value =
        static_cast<uint16_t>(of_one(reinterpret_cast<const Plain<uint16_t>*>(a)[last].value,
                                     reinterpret_cast<const Plain<uint16_t>*>(b)[last].value));
  }

  static uint32_t with_right(uint32_t a, float right) {
    return narrowed(Narrow{}, Op::of(widened(Narrow{}, a), right));
  }

  static void with_one(std::byte* data, size_t n_elems, float right) {
    auto* const into = reinterpret_cast<Plain<uint32_t>*>(data);
    const size_t n_pairs = n_elems / 2;
    SHOAL_INDEPENDENT
    for (size_t i = 0; i < n_pairs; ++i) {
      const uint32_t pair = into[i].value;
      into[i].value = with_right(pair & 0xffff, right) | with_right(pair >> 16, right) << 16;
    }
    if (n_elems % 2 == 0) return;
    auto& last = reinterpret_cast<Plain<uint16_t>*>(data)[n_elems - 1];
    last.value = static_cast<uint16_t>(with_right(last.value, right));
  }
};

template <class Op>
struct Loop<Bfloat16, Op> : PairLoop<Bfloat16, Op> {};

#if !defined(__F16C__)
template <class Op>
struct Loop<Float16, Op> : PairLoop<Float16, Op> {};
#else
template <class Op>
struct Loop<Float16, Op> {
  using Number = float;
  static constexpr size_t kLanes = sizeof(Floats) / sizeof(float);
  static constexpr size_t kRunBytes = kLanes * sizeof(uint16_t);

  static void fold(std::byte* out, const std::byte* a, const std::byte* b, size_t n_elems) {
    size_t n_bytes = n_elems * sizeof(uint16_t);
    for (; n_bytes >= kRunBytes; n_bytes -= kRunBytes) {
      narrow_run(out, Op::of(widened_run(a), widened_run(b)));
      out += kRunBytes;
      a += kRunBytes;
      b += kRunBytes;
    }
    if (n_bytes == 0) return;
    std::byte left[kRunBytes] = {};
    std::byte right[kRunBytes] = {};
    __builtin_memcpy(left, a, n_bytes);
    __builtin_memcpy(right, b, n_bytes);
    narrow_run(left, Op::of(widened_run(left), widened_run(right)));
    __builtin_memcpy(out, left, n_bytes);
  }

  static void with_one(std::byte* data, size_t n_elems, float right) {
    const Floats all = right - Floats{};  // in every lane; x - 0 keeps -0 too
    size_t n_bytes = n_elems * sizeof(uint16_t);
    for (; n_bytes >= kRunBytes; n_bytes -= kRunBytes) {
      narrow_run(data, Op::of(widened_run(data), all));
      data += kRunBytes;
    }
    if (n_bytes == 0) return;
    std::byte left[kRunBytes] = {};
    __builtin_memcpy(left, data, n_bytes);
    narrow_run(left, Op::of(widened_run(left), all));
    __builtin_memcpy(data, left, n_bytes);
  }
};
#endif

// A complex number is two floats, except in a product.
template <class T, class Op>
void fold_parts(std::byte* out, const std::byte* a, const std::byte* b, size_t n_elems) {
  Loop<T, Op>::fold(out, a, b, 2 * n_elems);
}

// -x, by bits: g++ 12 turns a vector of p - q and p + q into one fused multiply-and-add even under
// -ffp-contract=off, and the bits would differ between instruction sets.
inline float negative(float x) { return float_of(bits_of(x) ^ 0x80000000); }
inline double negative(double x) {
  return __builtin_bit_cast(double, __builtin_bit_cast(uint64_t, x) ^ 0x8000000000000000);
}

template <class T>
void complex_product(std::byte* out, const std::byte* a, const std::byte* b, size_t n_elems) {
  struct __attribute__((packed, may_alias)) Complex {
    T re, im;
  };
  auto* const into = reinterpret_cast<Complex*>(out);
  const auto* const left = reinterpret_cast<const Complex*>(a);
  const auto* const right = reinterpret_cast<const Complex*>(b);
  SHOAL_INDEPENDENT
  for (size_t i = 0; i < n_elems; ++i) {
    const T re = left[i].re * right[i].re + negative(left[i].im * right[i].im);
    const T im = left[i].re * right[i].im + left[i].im * right[i].re;
    into[i].re = re;
    into[i].im = im;
  }
}

template <class T, size_t kParts = 1>
void divide_numbers(std::byte* data, size_t n_elems, uint32_t divisor) {
  using Number = typename Loop<T, Quotient>::Number;
  Loop<T, Quotient>::with_one(data, kParts * n_elems, static_cast<Number>(divisor));
}

// Up to 32 bits through double, which has a vector division. It is exact: a quotient of 32-bit
// integers that is not an integer differs from the nearest by at least 2^-32 of itself.
template <class T>
void divide_integers(std::byte* data, size_t n_elems, uint32_t divisor) {
  auto* const into = reinterpret_cast<Plain<T>*>(data);
  if constexpr (sizeof(T) > sizeof(divisor)) {
    for (size_t i = 0; i < n_elems; ++i) into[i].value /= static_cast<T>(divisor);
  } else {
    const double right = divisor;
    SHOAL_INDEPENDENT
    for (size_t i = 0; i < n_elems; ++i) into[i].value = static_cast<T>(into[i].value / right);
  }
}

// The table, columns in the order of FoldOp, rows in the order of DType.

#define SHOAL_FLOAT_ROW(T) \
  {Loop<T, Sum>::fold,     \
   Loop<T, Sum>::fold,     \
   Loop<T, Product>::fold, \
   Loop<T, Min>::fold,     \
   Loop<T, Max>::fold,     \
   nullptr,                \
   nullptr,                \
   nullptr}
// Wrapping and bitwise folds use the unsigned type of the same width.
#define SHOAL_INTEGER_ROW(T, Unsigned)                                                  \
  {Loop<Unsigned, Sum>::fold, Loop<Unsigned, Sum>::fold, Loop<Unsigned, Product>::fold, \
   Loop<T, Min>::fold,        Loop<T, Max>::fold,        Loop<Unsigned, Band>::fold,    \
   Loop<Unsigned, Bor>::fold, Loop<Unsigned, Bxor>::fold}
#define SHOAL_BOOL_ROW                                     \
  {Loop<uint8_t, Either>::fold, nullptr,                   \
   Loop<uint8_t, Both>::fold,   Loop<uint8_t, Both>::fold, \
   Loop<uint8_t, Either>::fold, Loop<uint8_t, Both>::fold, \
   Loop<uint8_t, Either>::fold, Loop<uint8_t, OneOf>::fold}
#define SHOAL_COMPLEX_ROW(T) \
  {fold_parts<T, Sum>,       \
   fold_parts<T, Sum>,       \
   complex_product<T>,       \
   nullptr,                  \
   nullptr,                  \
   nullptr,                  \
   nullptr,                  \
   nullptr}

constexpr Kernels table(const char* isa) {
  return {
      isa,
      {SHOAL_FLOAT_ROW(float), SHOAL_FLOAT_ROW(double), SHOAL_FLOAT_ROW(Float16),
       SHOAL_FLOAT_ROW(Bfloat16), SHOAL_INTEGER_ROW(int8_t, uint8_t),
       SHOAL_INTEGER_ROW(int16_t, uint16_t), SHOAL_INTEGER_ROW(int32_t, uint32_t),
       SHOAL_INTEGER_ROW(int64_t, uint64_t), SHOAL_INTEGER_ROW(uint8_t, uint8_t), SHOAL_BOOL_ROW,
       SHOAL_COMPLEX_ROW(float), SHOAL_COMPLEX_ROW(double), SHOAL_INTEGER_ROW(uint16_t, uint16_t),
       SHOAL_INTEGER_ROW(uint32_t, uint32_t), SHOAL_INTEGER_ROW(uint64_t, uint64_t)},
      {divide_numbers<float>, divide_numbers<double>, divide_numbers<Float16>,
       divide_numbers<Bfloat16>, divide_integers<int8_t>, divide_integers<int16_t>,
       divide_integers<int32_t>, divide_integers<int64_t>, divide_integers<uint8_t>, nullptr,
       divide_numbers<float, 2>, divide_numbers<double, 2>, divide_integers<uint16_t>,
       divide_integers<uint32_t>, divide_integers<uint64_t>},
      {Narrow{}, kBfloat16Sums, kFloat16Sums, Mx<E4m3>::kSums, Mx<Int8>::kSums, Mx<E2m1>::kSums,
       TopK<EightBits>::kSums, TopK<TwoBits>::kSums}};
}

}  // namespace
}  // namespace shoal
