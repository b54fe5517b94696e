// Every fold on every instruction set of this machine, against the reference.

#include <cstdint>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>

#include "fold/kernels.h"
#include "test/check.h"
#include "test/fold_truth.h"

namespace shoal::test {
namespace {

using Bytes = std::vector<std::byte>;

constexpr size_t kLengths[] = {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 63, 64, 65, 1000, 4097};

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
    if (!right) fail(__FILE__, __LINE__, name(kernels, dtype, op, n_elems));

    Bytes in_place = a;
    fold(in_place.data() + start, in_place.data() + start, b.data() + 2 * start, n_elems);
    right = same(dtype, in_place.data() + start, truth.data(), n_elems);
    if (!right) fail(__FILE__, __LINE__, "in place: " + name(kernels, dtype, op, n_elems));
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

TEST("every fold equals the reference at every length and start, in place or not") {
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

TEST("a meaningless pair of op and dtype has no fold on any instruction set") {
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

TEST("an unknown number has no fold, no size and no name") {
  CHECK(fold_function(DType(kDTypes), FoldOp::kSum) == nullptr);
  CHECK(fold_function(DType::kFloat32, FoldOp(kFoldOps)) == nullptr);
  CHECK(!is_dtype(kDTypes) && is_dtype(kDTypes - 1));
  CHECK(!is_fold_op(kFoldOps) && is_fold_op(kFoldOps - 1));
  CHECK_EQ(size_of(DType(kDTypes)), 0);
  CHECK_EQ(std::string_view(name_of(DType(255))), "?");
  CHECK_EQ(std::string_view(name_of(FoldOp(kFoldOps))), "?");
}

TEST("sizes and names match the numbers") {
  constexpr size_t kSizes[] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 1, 8, 16, 2, 4, 8};
  for (size_t dtype = 0; dtype < std::size(kSizes); ++dtype)
    CHECK_EQ(size_of(DType(dtype)), kSizes[dtype]);
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

TEST("min and max give NaN if either side is NaN, and the right one of two equal zeros") {
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

TEST("every float16 and bfloat16 survives a round trip through float32") {
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

TEST("the instruction set in use is the requested one, else the best") {
  const char* const wanted = std::getenv("SHOAL_ISA");
  std::string_view expected = kernels_here().back()->isa;
  for (const Kernels* kernels : kernels_here()) {
    if (wanted != nullptr && std::string_view(wanted) == kernels->isa) expected = wanted;
  }
  CHECK_EQ(std::string_view(fold_isa()), expected);
  CHECK(std::string_view(kernels_here().front()->isa) == "baseline");
}

}  // namespace
}  // namespace shoal::test
