// Divisions on every instruction set of this machine, against the reference.

#include <cstdint>

#include "fold/kernels.h"
#include "test/check.h"
#include "test/fold_truth.h"

namespace shoal::test {
namespace {

using Bytes = std::vector<std::byte>;

constexpr uint32_t kDivisors[] = {1, 2, 3, 7, 16, 300, 65537, 4294967295U};

TEST("divide equals the reference for every dtype and divisor") {
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

TEST("divide truncates integers toward zero and leaves bool unchanged") {
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

}  // namespace
}  // namespace shoal::test
