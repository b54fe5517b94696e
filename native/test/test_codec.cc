// The codecs on every instruction set of this machine, against numbers: of the two bfloat16 around
// a float the nearer one is right, told in double, where both distances are exact.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "fold/codec.h"
#include "fold/kernels.h"
#include "test/check.h"
#include "test/fake_link.h"
#include "test/nearest.h"

namespace shoal {
namespace {

using test::bits_of;
using test::FakeRandom;
using test::float_of;
using test::nearest;

// Each exponent with fractions near what decides, both signs; NaNs, infinities, denormals, zeros.
std::vector<float> awkward_floats() {
  std::vector<float> floats;
  for (uint32_t upper = 0; upper < 0x10000; upper += 0x20)
    for (const uint32_t odd : {0u, 1u, 0x1fu})
      for (const uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
        floats.push_back(float_of((upper | odd) << 16 | lower));
  FakeRandom random(1);
  for (int n = 0; n < 1000; ++n) floats.push_back(float_of(static_cast<uint32_t>(random.next())));
  return floats;
}

// Bytes that begin `start` bytes behind an aligned address, with a guard behind their end.
struct Room {
  Room(size_t n_bytes, size_t start) : all(start + n_bytes + 64, std::byte{0xa5}), at(&all[start]) {
    end = at + n_bytes;
  }
  bool is_intact() const {
    for (const std::byte* byte = end; byte < all.data() + all.size(); ++byte)
      if (*byte != std::byte{0xa5}) return false;
    return true;
  }
  std::vector<std::byte> all;
  std::byte* at;
  std::byte* end;
};

constexpr size_t kLengths[] = {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 1000, 4097};

bool same_bits(const std::byte* a, const void* b, size_t n_bytes) {
  return n_bytes == 0 || std::memcmp(a, b, n_bytes) == 0;
}

template <class Check>  // (codec, floats, where)
void for_all(Check check) {
  const std::vector<float> floats = awkward_floats();
  for (const Kernels* kernels : kernels_here()) {
    check(kernels->bfloat16_sums, floats, size_t{0}, std::string(kernels->isa));
    for (const size_t n_elems : kLengths)
      for (const size_t start : {size_t{0}, size_t{2}, size_t{3}})
        check(kernels->bfloat16_sums,
              std::vector<float>(floats.end() - static_cast<std::ptrdiff_t>(n_elems), floats.end()),
              start, kernels->isa + (" of " + std::to_string(n_elems)));
  }
}

}  // namespace

TEST("encoding gives the nearest bfloat16, of two as near the even one, and keeps NaN") {
  for_all([](const Narrow& codec, const std::vector<float>& floats, size_t start,
             const std::string& where) {
    std::vector<uint16_t> truth;
    for (const float value : floats) truth.push_back(nearest(value));
    Room in(4 * floats.size(), start), out(2 * floats.size(), start);
    if (!floats.empty()) std::memcpy(in.at, floats.data(), 4 * floats.size());
    codec.encode(out.at, in.at, floats.size());
    if (!same_bits(out.at, truth.data(), 2 * truth.size()) || !out.is_intact())
      test::fail(__FILE__, __LINE__, where);
  });
}

TEST("every bfloat16 is decoded to the float that it stands for") {
  std::vector<uint16_t> all(65536);
  std::vector<float> truth(65536);
  for (size_t bits = 0; bits < all.size(); ++bits) {
    all[bits] = static_cast<uint16_t>(bits);
    truth[bits] = float_of(static_cast<uint32_t>(bits) << 16);
  }
  for (const Kernels* kernels : kernels_here()) {
    Room out(4 * all.size(), 0);
    const auto* from = reinterpret_cast<const std::byte*>(all.data());
    kernels->bfloat16_sums.decode(out.at, from, all.size());
    CHECK(same_bits(out.at, truth.data(), 4 * truth.size()));
    CHECK(out.is_intact());
  }
}

TEST("rounding in place is encoding and decoding") {
  for_all([](const Narrow& codec, const std::vector<float>& floats, size_t start,
             const std::string& where) {
    std::vector<uint32_t> truth;
    for (const float value : floats) truth.push_back(uint32_t{nearest(value)} << 16);
    Room data(4 * floats.size(), start);
    if (!floats.empty()) std::memcpy(data.at, floats.data(), 4 * floats.size());
    codec.round(data.at, floats.size());
    if (!same_bits(data.at, truth.data(), 4 * truth.size()) || !data.is_intact())
      test::fail(__FILE__, __LINE__, where);
  });
}

TEST("a fold of what is encoded adds the decoded numbers in float32, in place or not") {
  for_all([](const Narrow& codec, const std::vector<float>& floats, size_t start,
             const std::string& where) {
    const size_t n_elems = floats.size();
    std::vector<uint16_t> encoded;
    for (size_t i = 0; i < n_elems; ++i) encoded.push_back(nearest(floats[n_elems - 1 - i]));
    Room left(4 * n_elems, start), right(2 * n_elems, start), out(4 * n_elems, start);
    if (n_elems > 0) std::memcpy(left.at, floats.data(), 4 * n_elems);
    if (n_elems > 0) std::memcpy(right.at, encoded.data(), 2 * n_elems);
    codec.fold(out.at, left.at, right.at, n_elems);
    codec.fold(left.at, left.at, right.at, n_elems);
    bool is_right = out.is_intact() && left.is_intact() && same_bits(out.at, left.at, 4 * n_elems);
    for (size_t i = 0; i < n_elems; ++i) {
      const float sum = floats[i] + float_of(uint32_t{encoded[i]} << 16);
      uint32_t bits;
      std::memcpy(&bits, out.at + 4 * i, sizeof bits);
      is_right &= std::isnan(sum) ? std::isnan(float_of(bits)) : bits == bits_of(sum);
    }
    if (!is_right) test::fail(__FILE__, __LINE__, where);
  });
}

TEST("denormals, ties, the largest number and NaN are encoded as the docs say") {
  const auto encoded = [](uint32_t bits) {
    const float value = float_of(bits);
    uint16_t out = 0;
    narrow_for(Codec::kBfloat16, DType::kFloat32, FoldOp::kSum)
        ->encode(reinterpret_cast<std::byte*>(&out), reinterpret_cast<const std::byte*>(&value), 1);
    return out;
  };
  CHECK_EQ(encoded(0x3f808000), 0x3f80);  // 1 + 2^-8: tie, down to even
  CHECK_EQ(encoded(0x3f818000), 0x3f82);  // 1 + 2^-7 + 2^-8: tie, up to even
  CHECK_EQ(encoded(0x7f7f7fff), 0x7f7f);
  CHECK_EQ(encoded(0x7f7f8000), 0x7f80);  // 3.396e38 and more are infinity
  CHECK_EQ(encoded(0xff7fffff), 0xff80);
  CHECK_EQ(encoded(0x00010000), 0x0001);  // the smallest denormal is not flushed
  CHECK_EQ(encoded(0x00000001), 0x0000);
  CHECK_EQ(encoded(0x80000000), 0x8000);
  CHECK_EQ(encoded(0x7f800001), 0x7fc0);  // a NaN by its lowest bit only
}

TEST("a codec is for sums of float32 and nothing else") {
  CHECK(narrow_for(Codec::kBfloat16, DType::kFloat32, FoldOp::kAvg) != nullptr);
  for (size_t dtype = 0; dtype < kDTypes; ++dtype)
    for (size_t op = 0; op < kFoldOps; ++op) {
      CHECK(narrow_for(Codec::kIdentity, DType(dtype), FoldOp(op)) == nullptr);
      const bool sums = DType(dtype) == DType::kFloat32 && FoldOp(op) <= FoldOp::kAvg;
      CHECK_EQ(narrow_for(Codec::kBfloat16, DType(dtype), FoldOp(op)) != nullptr, sums);
    }
}

}  // namespace shoal
