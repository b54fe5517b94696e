// The contract of all codecs, on every instruction set of this machine: against the numbers of
// codec_truth.h, and the properties by which all ranks have the same bits.

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "fold/codec.h"
#include "fold/kernels.h"
#include "fold/random.h"
#include "test/check.h"
#include "test/codec_truth.h"
#include "test/fake_link.h"
#include "test/nearest.h"

namespace shoal::test {
namespace {

using Bytes = std::vector<std::byte>;

// Each exponent with fractions near the ties, of both signs; NaNs, infinities, denormals, zeros.
Floats awkward_floats() {
  Floats floats;
  for (uint32_t upper = 0; upper < 0x10000; upper += 0x20)
    for (const uint32_t odd : {0u, 1u, 0x1fu})
      for (const uint32_t lower : {0u, 1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu})
        floats.push_back(float_of((upper | odd) << 16 | lower));
  return floats;
}

// Blocks whose elements have exponents near each other, as gradients do, some of them zeros.
Floats alike_floats(size_t n_elems, uint64_t seed) {
  FakeRandom random(seed);
  Floats floats;
  uint32_t top = 127;
  for (size_t i = 0; i < n_elems; ++i) {
    if (i % 32 == 0) top = 1 + static_cast<uint32_t>(random.below(254));
    const auto below = static_cast<uint32_t>(random.below(12));
    const uint32_t exponent = below < top ? top - below : 0;
    const auto rest = static_cast<uint32_t>(random.next()) & 0x807fffff;
    floats.push_back(random.chance(0.1) ? 0.0F : float_of(exponent << 23 | rest));
  }
  return floats;
}

Floats random_bits_as_floats(size_t n_elems, uint64_t seed) {
  FakeRandom random(seed);
  Floats floats;
  for (size_t i = 0; i < n_elems; ++i)
    floats.push_back(float_of(static_cast<uint32_t>(random.next())));
  return floats;
}

// Few different magnitudes, and many zeros: codecs that keep the largest choose among equals.
Floats equal_floats(size_t n_elems) {
  FakeRandom random(n_elems);
  Floats floats;
  for (size_t i = 0; i < n_elems; ++i) {
    const float value = random.chance(0.97) ? 0.0F : random.chance(0.5) ? 1.125F : 1.5F;
    floats.push_back(random.chance(0.5) ? value : -value);
  }
  return floats;
}

std::vector<Floats> inputs() {
  std::vector<Floats> all = {
      awkward_floats(),       alike_floats(20000, 1), random_bits_as_floats(5000, 2),
      equal_floats(9000),     Floats(100, 0.0F),      Floats(4100, -3.0F),
      Floats(40, 0x1.8p-98F), Floats(40, 0x1.7p-98F), Floats(5000, 3.4e38F)};
  for (const size_t n :
       {0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 65, 1000, 4095, 4097, 9000}) {
    all.push_back(alike_floats(n, n));
    all.push_back(random_bits_as_floats(n, n));
  }
  return all;
}

// An input, its encoded form, and its decoded form.
struct Case {
  Floats floats;
  Bytes encoded;
  Floats arrived;
};

const std::vector<Case>& cases_of(const CodecTruth& truth) {
  static std::map<std::pair<Codec, uint32_t>, std::vector<Case>> all;
  std::vector<Case>& cases = all[{truth.codec, truth.keep}];
  if (!cases.empty()) return cases;
  for (const Floats& floats : inputs()) {
    const Bytes encoded = truth.encode(floats);
    cases.push_back({floats, encoded, truth.decode(encoded, floats.size())});
  }
  return cases;
}

// Bytes that begin `start` bytes after an aligned address, with a guard after their end.
struct Room {
  Room(size_t n, size_t start)
      : n_bytes(n), all(start + n + 64, std::byte{0xa5}), at(&all[start]) {}
  Room(const Bytes& given, size_t start) : Room(given.size(), start) {
    if (n_bytes > 0) std::memcpy(at, given.data(), n_bytes);
  }
  Room(const Floats& given, size_t start) : Room(4 * given.size(), start) {
    if (n_bytes > 0) std::memcpy(at, given.data(), n_bytes);
  }
  bool is_intact() const {
    for (const std::byte* byte = at + n_bytes; byte < all.data() + all.size(); ++byte)
      if (*byte != std::byte{0xa5}) return false;
    return true;
  }
  Bytes bytes() const { return Bytes(at, at + n_bytes); }
  size_t n_bytes;
  Bytes all;
  std::byte* at;
};

// All NaNs count as one, because which of two is kept differs between instruction sets.
bool same(const Floats& a, const std::byte* b) {
  for (size_t i = 0; i < a.size(); ++i) {
    const auto other = get<float>(b + 4 * i);
    const bool is_nan = std::isnan(a[i]) && std::isnan(other);
    if (!is_nan && bits_of(a[i]) != bits_of(other)) return false;
  }
  return true;
}

Narrow row_of(const Kernels& kernels, const CodecTruth& truth) {
  Narrow narrow = kernels.narrow[static_cast<size_t>(truth.codec)];
  narrow.keep = truth.keep;
  return narrow;
}

template <class Check>  // (codec, truth, start): true if it holds
void for_all(Check check) {
  for (const Kernels* kernels : kernels_here())
    for (const CodecTruth& truth : kCodecTruths)
      for (const size_t start : {size_t{0}, size_t{2}, size_t{3}})
        if (!check(row_of(*kernels, truth), truth, start))
          test::fail(__FILE__, __LINE__,
                     kernels->isa + (", codec " + std::to_string(static_cast<int>(truth.codec))));
}

Bytes any_bytes(const Narrow& codec, size_t n_elems, uint64_t seed) {
  FakeRandom random(seed);
  Bytes bytes(codec.bytes_of(codec, n_elems));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next());
  return bytes;
}

Floats floats_of(const Bytes& bytes) {
  Floats floats(bytes.size() / sizeof(float));
  if (!bytes.empty()) std::memcpy(floats.data(), bytes.data(), bytes.size());
  return floats;
}

// Floats that a codec produces from any bytes.
Floats decoded(const Narrow& codec, const Bytes& bytes, size_t n_elems) {
  Floats floats(n_elems);
  codec.decode(codec, reinterpret_cast<std::byte*>(floats.data()), bytes.data(), n_elems);
  return floats;
}

}  // namespace

TEST("every codec has a reference, and every kernel a row for each instruction set") {
  for (const Kernels* kernels : kernels_here())
    for (size_t codec = 0; codec < kCodecs; ++codec) {
      bool has_truth = false;
      for (const CodecTruth& truth : kCodecTruths) has_truth |= truth.codec == Codec(codec);
      CHECK_EQ(kernels->narrow[codec].encode != nullptr, has_truth);
    }
}

TEST("encoding gives the bytes of the reference") {
  for_all([](const Narrow& codec, const CodecTruth& truth, size_t start) {
    bool is_right = true;
    for (const Case& one : cases_of(truth)) {
      const Room in(one.floats, start);
      Room out(codec.bytes_of(codec, one.floats.size()), start);
      codec.encode(codec, out.at, in.at, one.floats.size());
      is_right = is_right && out.bytes() == one.encoded && out.is_intact();
    }
    return is_right;
  });
}

TEST("any bytes decode to the reference's numbers, and nothing is written past the end") {
  for_all([](const Narrow& codec, const CodecTruth& truth, size_t start) {
    bool is_right = true;
    for (const size_t n_elems : {0, 1, 5, 32, 33, 100, 4096, 5000, 70000}) {
      const Bytes bytes = any_bytes(codec, n_elems, n_elems);
      const Room in(bytes, start);
      Room out(4 * n_elems, start);
      codec.decode(codec, out.at, in.at, n_elems);
      is_right = is_right && same(truth.decode(bytes, n_elems), out.at) && out.is_intact();
    }
    return is_right;
  });
}

TEST("rounding a rounded value again changes nothing") {
  std::vector<Floats> all = {awkward_floats()};
  for (uint64_t seed = 0; seed < 10; ++seed) all.push_back(alike_floats(20000 * 32 + 5, seed));
  for_all([&](const Narrow& codec, const CodecTruth&, size_t start) {
    bool is_right = true;
    const auto check = [&](const Floats& floats) {
      Room data(floats, start);
      codec.round(codec, data.at, floats.size());
      const Bytes once = data.bytes();
      codec.round(codec, data.at, floats.size());
      is_right = is_right && same(floats_of(once), data.at);
    };
    for (const Floats& floats : all) check(floats);
    for (uint64_t seed = 0; seed < 10; ++seed)
      check(decoded(codec, any_bytes(codec, 50001, seed), 50001));
    return is_right;
  });
}

TEST("rounding in place equals encoding and decoding") {
  for_all([](const Narrow& codec, const CodecTruth& truth, size_t start) {
    bool is_right = true;
    for (const Case& one : cases_of(truth)) {
      Room data(one.floats, start);
      codec.round(codec, data.at, one.floats.size());
      is_right = is_right && same(one.arrived, data.at) && data.is_intact();
    }
    return is_right;
  });
}

TEST("a fold of encoded data adds the decoded numbers in float32, in place or not") {
  for_all([](const Narrow& codec, const CodecTruth& truth, size_t start) {
    bool is_right = true;
    for (const Case& one : cases_of(truth)) {
      const size_t n_elems = one.floats.size();
      const Floats before(one.floats.rbegin(), one.floats.rend());
      Floats sums = one.arrived;
      // An element that a codec drops is not touched: -0 stays, where adding +0 gives +0.
      for (size_t i = 0; i < n_elems; ++i)
        sums[i] = truth.keep > 0 && sums[i] == 0 ? before[i] : before[i] + sums[i];
      Room left(before, start), out(4 * n_elems, start);
      const Room right(one.encoded, start);
      codec.fold(codec, out.at, left.at, right.at, n_elems);
      codec.fold(codec, left.at, left.at, right.at, n_elems);
      is_right = is_right && same(sums, out.at) && same(sums, left.at);
      is_right = is_right && out.is_intact() && left.is_intact();
    }
    return is_right;
  });
}

TEST("the bytes of whole blocks add up, and so do the wire bytes of their elements") {
  const Floats floats = alike_floats(20000, 3);
  for_all([&](const Narrow& codec, const CodecTruth& truth, size_t) {
    const size_t n_first = 2 * size_t{codec.block};
    const Floats first(floats.begin(), floats.begin() + static_cast<std::ptrdiff_t>(n_first));
    const Floats rest(floats.begin() + static_cast<std::ptrdiff_t>(n_first), floats.end());
    Bytes parts = truth.encode(first);
    for (const std::byte byte : truth.encode(rest)) parts.push_back(byte);
    return codec.bytes_of(codec, 0) == 0 && parts == truth.encode(floats) &&
           codec.bytes_of(codec, first.size()) + codec.bytes_of(codec, rest.size()) ==
               codec.bytes_of(codec, floats.size());
  });
}

#if defined(__x86_64__)
TEST("flush-to-zero, which torch can switch on, changes no bits") {
  const unsigned before = _mm_getcsr();
  for_all([&](const Narrow& codec, const CodecTruth& truth, size_t start) {
    bool is_right = true;
    for (const Case& one : cases_of(truth)) {
      const size_t n_elems = one.floats.size();
      const Room in(one.floats, start);
      Room encoded(one.encoded.size(), start), decoded(4 * n_elems, start);
      Room flushed(one.floats, start), random(one.floats, start);
      codec.round_stochastic(codec, random.at, n_elems, 1, 0);
      _mm_setcsr(before | 0x8040);  // denormal results, and denormal operands, are zero
      codec.encode(codec, encoded.at, in.at, n_elems);
      codec.decode(codec, decoded.at, encoded.at, n_elems);
      codec.round_stochastic(codec, flushed.at, n_elems, 1, 0);
      _mm_setcsr(before);
      is_right = is_right && encoded.bytes() == one.encoded && same(one.arrived, decoded.at) &&
                 same(floats_of(random.bytes()), flushed.at);
    }
    return is_right;
  });
}
#endif

// ---- stochastic rounding

Room rounded_at_random(const Narrow& codec, const Floats& floats, size_t start, uint64_t seed,
                       uint64_t first = 0) {
  Room data(floats, start);
  codec.round_stochastic(codec, data.at, floats.size(), seed, first);
  return data;
}

TEST("random bits match lowbias32 as another implementation computes it") {
  CHECK_EQ(mixed(1), 0x688990c0U);
  CHECK_EQ(mixed(0xdeadbeef), 0xe628c683U);
  CHECK_EQ(salt_of(0), 0xae6f80f1U);
  CHECK_EQ(salt_of(1ULL << 32), 0x23064794U);
  CHECK_EQ(random_bits(salt_of(7), 1), 0x8fcf0595U);
  CHECK_EQ(random_bits(salt_of(7), (1ULL << 32) + 2), 0x27cb7811U);
}

TEST("values rounded at random are encoded unchanged, with the same bits on each instruction set") {
  const std::vector<Floats> all = inputs();
  for_all([&](const Narrow& codec, const CodecTruth& truth, size_t start) {
    bool is_right = true;
    for (const Floats& floats : all) {
      const Room data = rounded_at_random(codec, floats, start, 7, 123);
      Floats result(floats.size());
      if (!floats.empty()) std::memcpy(result.data(), data.at, data.n_bytes);
      const Floats sent = truth.decode(truth.encode(result), result.size());
      const Room base = rounded_at_random(row_of(*kernels_here()[0], truth), floats, 0, 7, 123);
      is_right = is_right && same(sent, data.at) && same(result, base.at) && data.is_intact();
    }
    return is_right;
  });
}

TEST("values rounded to nearest are not rounded at random") {
  for_all([](const Narrow& codec, const CodecTruth& truth, size_t start) {
    bool is_right = true;
    for (const Case& one : cases_of(truth))
      is_right =
          is_right && same(one.arrived, rounded_at_random(codec, one.arrived, start, 1 + start).at);
    return is_right;
  });
}

TEST("random bits depend on the seed and the offset in the buffer, not on how it is cut") {
  const Floats floats = alike_floats(20000, 4);
  for_all([&](const Narrow& codec, const CodecTruth& truth, size_t start) {
    if (truth.keep > 0) return true;  // it rounds to nearest
    const Room whole = rounded_at_random(codec, floats, start, 5);
    const size_t cut = 2 * size_t{codec.block};
    const Floats rest(floats.begin() + static_cast<std::ptrdiff_t>(cut), floats.end());
    const Room part = rounded_at_random(codec, rest, start, 5, cut);
    const Room other = rounded_at_random(codec, floats, start, 6);
    return std::memcmp(whole.at + 4 * cut, part.at, part.n_bytes) == 0 &&
           std::memcmp(whole.at, other.at, whole.n_bytes) != 0;
  });
}

TEST("random rounding has two outcomes around the value, and the value as its mean") {
  constexpr size_t kElems = 64;
  constexpr int kTimes = 4000;
  Floats floats;
  for (size_t i = 0; i < kElems; ++i)
    floats.push_back(static_cast<float>(std::sin(1.0 + 3.7 * static_cast<double>(i * i))));
  for (size_t i = 0; i < 32; ++i) floats[i] *= 0.7F;
  floats[3] = 1e-6F;   // a float16 of few bits
  floats[40] = 1.99F;  // beyond the largest of MX formats: this block takes the next scale
  for_all([&](const Narrow& codec, const CodecTruth& truth, size_t start) {
    if (truth.keep > 0) return true;  // it drops elements
    std::vector<double> sum(kElems);
    std::vector<std::set<float>> outcomes(kElems);
    for (int time = 1; time <= kTimes; ++time) {
      const Room data = rounded_at_random(codec, floats, start, static_cast<uint64_t>(time));
      for (size_t i = 0; i < kElems; ++i) {
        const auto value = get<float>(data.at + 4 * i);
        sum[i] += value;
        outcomes[i].insert(value);
      }
    }
    bool is_right = true;
    for (size_t i = 0; i < kElems; ++i) {
      const double value = floats[i], low = *outcomes[i].begin(), high = *outcomes[i].rbegin();
      // An outcome that is too rare may not occur.
      const bool both = outcomes[i].size() == 2 && low <= value && value <= high;
      const double most = truth.gap * (i < 32 ? 1.0 : 2.0);
      const double gap = both ? high - low : most;
      is_right = is_right && (both || outcomes[i].size() == 1) && gap <= most;
      // Hoeffding: the mean is further off with a probability of 2 exp(-2 * 12) = 8e-11.
      is_right = is_right && std::fabs(sum[i] / kTimes - value) <= gap * std::sqrt(12.0 / kTimes);
    }
    return is_right;
  });
}

// ---- values that docs/wire.md states

template <class Bits>
Bits encoded(Codec codec, uint32_t bits) {
  const float value = float_of(bits);
  Bits out = 0;
  const auto narrow = narrow_for(codec, DType::kFloat32, FoldOp::kSum);
  narrow->encode(*narrow, reinterpret_cast<std::byte*>(&out),
                 reinterpret_cast<const std::byte*>(&value), 1);
  return out;
}

TEST("denormals, ties, the largest number and NaN are encoded as documented") {
  const auto bfloat16 = [](uint32_t bits) { return encoded<uint16_t>(Codec::kBfloat16, bits); };
  CHECK_EQ(bfloat16(0x3f808000), 0x3f80);  // 1 + 2^-8: tie, down to even
  CHECK_EQ(bfloat16(0x3f818000), 0x3f82);  // 1 + 2^-7 + 2^-8: tie, up to even
  CHECK_EQ(bfloat16(0x7f7f7fff), 0x7f7f);
  CHECK_EQ(bfloat16(0x7f7f8000), 0x7f80);  // 3.396e38 and more are infinity
  CHECK_EQ(bfloat16(0xff7fffff), 0xff80);
  CHECK_EQ(bfloat16(0x00010000), 0x0001);  // the smallest denormal is not flushed
  CHECK_EQ(bfloat16(0x00000001), 0x0000);
  CHECK_EQ(bfloat16(0x80000000), 0x8000);
  CHECK_EQ(bfloat16(0x7f800001), 0x7fc0);  // a NaN by its lowest bit only
  const auto float16 = [](uint32_t bits) { return encoded<uint16_t>(Codec::kFloat16, bits); };
  CHECK_EQ(float16(0x3f801000), 0x3c00);  // 1 + 2^-11: tie, down to even
  CHECK_EQ(float16(0x477fefff), 0x7bff);  // below 65,520
  CHECK_EQ(float16(0x477ff000), 0x7c00);  // 65,520 is infinity
  CHECK_EQ(float16(0x33800000), 0x0001);  // 2^-24
  CHECK_EQ(float16(0x33000000), 0x0000);  // 2^-25: tie, to zero
  CHECK_EQ(float16(0xb3000001), 0x8001);
}

TEST("a codec accepts sums of float32 only") {
  for (const CodecTruth& truth : kCodecTruths)
    for (size_t dtype = 0; dtype < kDTypes; ++dtype)
      for (size_t op = 0; op < kFoldOps; ++op) {
        const bool sums = DType(dtype) == DType::kFloat32 && FoldOp(op) <= FoldOp::kAvg;
        CHECK_EQ(narrow_for(truth.codec, DType(dtype), FoldOp(op)).has_value(), sums);
        CHECK(!narrow_for(Codec::kIdentity, DType(dtype), FoldOp(op)));
      }
}

}  // namespace shoal::test
