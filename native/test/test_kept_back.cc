// The residuals of complete sums, with a codec that keeps the largest element of four.
#include <cmath>
#include <limits>
#include <vector>

#include "engine/segments/kept_back.h"
#include "test/check.h"

namespace shoal::test {
namespace {

constexpr uint32_t kBlock = 4;
constexpr uint64_t kBytes = 64;  // of the buffer

void keep_largest(const Narrow&, std::byte* data, size_t n_elems) {
  auto* const x = reinterpret_cast<float*>(data);
  for (size_t at = 0; at < n_elems; at += kBlock) {
    size_t largest = at;
    bool is_finite = true;
    for (size_t i = at; i < std::min<size_t>(at + kBlock, n_elems); ++i) {
      if (std::fabs(x[i]) > std::fabs(x[largest])) largest = i;
      is_finite = is_finite && std::isfinite(x[i]);
    }
    for (size_t i = at; i < std::min<size_t>(at + kBlock, n_elems); ++i)
      if (!is_finite)
        x[i] = std::numeric_limits<float>::quiet_NaN();
      else if (i != largest)
        x[i] = 0;
  }
}

Narrow largest_of_four() {
  Narrow narrow{};
  narrow.block = kBlock;
  narrow.keep = 1;
  narrow.round = &keep_largest;
  return narrow;
}

Subject subject_of(uint32_t averager, uint32_t step, uint32_t buffer = 0) {
  return averager << 24 | step << 10 | buffer;
}

std::vector<float> rounded(KeptBack& kept, Subject subject, std::vector<float> sums,
                           uint64_t first = 0, uint64_t tensor_bytes = kBytes) {
  kept.round(largest_of_four(), subject, tensor_bytes, first,
             reinterpret_cast<std::byte*>(sums.data()), sums.size());
  return sums;
}

using Floats = std::vector<float>;

TEST("over many steps the inputs equal the outputs plus the residual") {
  KeptBack kept;
  Floats in(10), out(10);
  const Floats zeros(10);
  uint32_t step = 2;
  for (; step < 50; ++step) {
    Floats sums(10);
    for (size_t i = 0; i < sums.size(); ++i)
      sums[i] = static_cast<float>((step * 7919 + i * 104729) % 257) - 128;
    const Floats came = rounded(kept, subject_of(3, step), sums);
    for (size_t i = 0; i < sums.size(); ++i) {
      in[i] += sums[i];
      out[i] += came[i];
    }
  }
  CHECK(in != out);
  for (int i = 0; i < 4; ++i) {  // each round of zeros releases one element of each block
    const Floats came = rounded(kept, subject_of(3, step++), zeros);
    for (size_t k = 0; k < came.size(); ++k) out[k] += came[k];
  }
  CHECK(in == out);
  CHECK(rounded(kept, subject_of(3, step), zeros) == zeros);
  CHECK_EQ(kept.n_bytes(), 10 * sizeof(float));
}

TEST("averagers, buffers and offsets have separate residuals, and steps share them") {
  KeptBack kept;
  CHECK(rounded(kept, subject_of(1, 2, 5), {1, 2, 3, 4}) == (Floats{0, 0, 0, 4}));
  CHECK(rounded(kept, subject_of(2, 2, 5), {0, 0, 0, 0}) == (Floats{0, 0, 0, 0}));
  CHECK(rounded(kept, subject_of(1, 2, 6), {0, 0, 0, 0}) == (Floats{0, 0, 0, 0}));
  CHECK(rounded(kept, subject_of(1, 2, 5), {0, 0, 0, 0}, 4) == (Floats{0, 0, 0, 0}));
  CHECK(rounded(kept, subject_of(1, 9, 5), {0, 0, 0, 0}) == (Floats{0, 0, 3, 0}));
}

TEST("no residual is kept without a subject or in an averager's first step") {
  KeptBack kept;
  for (const Subject subject : {Subject{0}, subject_of(1, 1)}) {
    CHECK(rounded(kept, subject, {1, 2, 3, 4}) == (Floats{0, 0, 0, 4}));
    CHECK(rounded(kept, subject, {0, 0, 0, 0}) == (Floats{0, 0, 0, 0}));
  }
  CHECK_EQ(kept.n_bytes(), size_t{0});
}

TEST("a first step drops the residual of its buffer and of no other") {
  KeptBack kept;
  for (const uint32_t buffer : {0, 1}) rounded(kept, subject_of(1, 5, buffer), {1, 2, 3, 4});
  CHECK(rounded(kept, subject_of(1, 1), Floats(4)) == Floats(4));
  CHECK(rounded(kept, subject_of(1, 2), Floats(4)) == Floats(4));
  CHECK(rounded(kept, subject_of(1, 2, 1), Floats(4)) == (Floats{0, 0, 3, 0}));
}

TEST("a block that is not finite keeps its residual, and other blocks still update theirs") {
  const float infinity = std::numeric_limits<float>::infinity();
  for (const float bad : {infinity, -infinity, std::nanf("")}) {
    KeptBack kept;
    rounded(kept, subject_of(1, 2), {1, 2, 3, 4, 5, 6, 7, 8});
    const Floats came = rounded(kept, subject_of(1, 3), {bad, 0, 0, 0, 0, 0, 0, 0});
    for (size_t i = 0; i < 4; ++i) CHECK(std::isnan(came[i]));
    CHECK(Floats(came.begin() + 4, came.end()) == (Floats{0, 0, 7, 0}));
    const Floats next = rounded(kept, subject_of(1, 4), Floats(8));
    CHECK(next == (Floats{0, 0, 3, 0, 0, 6, 0, 0}));
  }
}

TEST("residuals of a buffer that is cut differently are dropped") {
  KeptBack kept;
  rounded(kept, subject_of(1, 2), {1, 2, 3, 4});
  CHECK(rounded(kept, subject_of(1, 3), Floats(4), 0, kBytes + 4) == Floats(4));
  for (const uint64_t first : {0, 4})
    rounded(kept, subject_of(1, 4), {1, 2, 3, 4}, first, kBytes + 4);
  CHECK(rounded(kept, subject_of(1, 5), Floats(3), 0, kBytes + 4) == Floats(3));
  CHECK_EQ(kept.n_bytes(), 3 * sizeof(float));
}

TEST("the least recently used buffers make room, and a buffer without room is rounded") {
  KeptBack kept(8 * sizeof(float));
  rounded(kept, subject_of(1, 2), {1, 2, 3, 4});
  rounded(kept, subject_of(2, 2), {1, 2, 3, 4});
  rounded(kept, subject_of(1, 3), Floats(4));
  rounded(kept, subject_of(3, 2), {1, 2, 3, 4});
  CHECK_EQ(kept.n_bytes(), 8 * sizeof(float));
  CHECK(rounded(kept, subject_of(1, 4), Floats(4)) == (Floats{0, 2, 0, 0}));
  CHECK(rounded(kept, subject_of(2, 3), Floats(4)) == Floats(4));
  CHECK(rounded(kept, subject_of(4, 2), {1, 2, 3, 4, 1, 2, 3, 4, 5}) ==
        (Floats{0, 0, 0, 4, 0, 0, 0, 4, 5}));
  CHECK(kept.n_bytes() <= 8 * sizeof(float));
}

}  // namespace
}  // namespace shoal::test
