// The loops of the Microscaling (MX) formats, for the kernel sources only (see loops.h on why all
// is unnamed).
//
// Source: OCP Microscaling Formats (MX) Specification v1.0 (2023), sections 5 and 6. A block of 32
// elements is a scale byte (E8M0: 2^(byte - 127), 255 is NaN) and the elements: E4M3 or INT8 of a
// byte each, or E2M1, two to a byte. docs/wire.md has the bytes, docs/decisions/0074 the reasons.
//
// Every float operation here is exact, or its result is rounded to a multiple of an element's unit
// far above all denormals: flush-to-zero changes no bits. Blocks with scales near 2^-127 are
// lifted by 2^64 before, or lowered after, with integers. Choices are made by masks, minima and
// maxima of integers (see half.h on why): the compiler vectorises each loop over a block.
#pragma once

#include "fold/codec.h"
#include "fold/half.h"
#include "fold/narrow_loops.h"
#include "fold/plain.h"
#include "fold/random.h"

namespace shoal {
namespace {

inline constexpr uint32_t kMxBlock = 32;
inline constexpr uint32_t kNanScale = 255;
inline constexpr uint32_t kMagnitude = 0x7fffffff;
inline constexpr uint32_t kInfinityBits = 0x7f800000;
inline constexpr uint32_t kQuietNan = 0x7fc00000;

// For numbers below 2^31, such as the bits of non-negative floats, which ascend with the floats.
inline uint32_t lesser(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<int32_t>(a) < static_cast<int32_t>(b)
                                   ? static_cast<int32_t>(a)
                                   : static_cast<int32_t>(b));
}
inline uint32_t greater(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(static_cast<int32_t>(a) > static_cast<int32_t>(b)
                                   ? static_cast<int32_t>(a)
                                   : static_cast<int32_t>(b));
}

// The lesser, before a float operation: the compiler would move the operation under the condition.
inline uint32_t clamp(uint32_t a, uint32_t b) { return chosen(all_ones_if_less(a, b), a, b); }

// 2^(exponent - 127): the exponent as a float has it, 1 to 254.
inline float power(uint32_t exponent) { return float_of(exponent << 23); }

// Scales below this one take the path that avoids denormals.
inline constexpr uint32_t kLeastPlainScale = 30;
inline constexpr uint32_t kLift = 64;

// x * 2^64, for |x| < 2^62, from its bits and with denormals.
inline uint32_t lifted(uint32_t bits) {
  const uint32_t magnitude = bits & kMagnitude;
  const float denormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-85F;
  const uint32_t normal = magnitude + (kLift << 23);
  const uint32_t is_denormal = all_ones_if_less(magnitude, 0x00800000);
  return (bits & ~kMagnitude) | chosen(is_denormal, bits_of(denormal), normal);
}

// x / 2^64 if that is exact: the inverse.
inline uint32_t lowered(uint32_t bits) {
  const uint32_t magnitude = bits & kMagnitude;
  const uint32_t is_denormal = all_ones_if_less(magnitude, (kLift + 1) << 23);
  const float n_units = float_of(magnitude & is_denormal) * 0x1p85F;
  const auto denormal = static_cast<uint32_t>(static_cast<int32_t>(n_units));
  return (bits & ~kMagnitude) | chosen(is_denormal, denormal, magnitude - (kLift << 23));
}

// ---- element formats. v: an element's magnitude divided by the block's scale, below twice the
// largest power of two of the format.

// A float with kFraction fraction bits, whose codes ascend with its values. Below 2^kLeast it has
// the unit of the numbers just above.
template <uint32_t kFraction, int kLeast, uint32_t kTop, uint32_t kLargestCode, uint32_t kBitsEach>
struct SmallFloat {
  static constexpr uint32_t kBits = kBitsEach;
  static constexpr uint32_t kTopExponent = kTop;  // of the largest power of two
  static constexpr uint32_t kUnits = 0;           // v is in units of 2^-kUnits
  static constexpr uint32_t kShift = 23 - kFraction;
  static constexpr uint32_t kLeastBits = static_cast<uint32_t>(127 + kLeast) << 23;
  static constexpr uint32_t kBeforeLeast = kLeastBits - (1U << 23);
  static constexpr uint32_t kSignBit = kBits - 1;
  static constexpr uint32_t kCodeMask = (1U << kSignBit) - 1;
  static constexpr bool kHasNan = kLargestCode < kCodeMask;
  static constexpr uint32_t kLargestBits = (kLargestCode << kShift) + kBeforeLeast;
  static constexpr float kLargest = __builtin_bit_cast(float, kLargestBits);

  // The bits of the power of two at or below v, no less than 2^kLeast.
  static uint32_t binade(uint32_t v) { return greater(v & kInfinityBits, kLeastBits); }
  // The code of n units of the numbers in a binade.
  static uint32_t code_of(uint32_t binade, uint32_t n_units) {
    return ((binade - kLeastBits) >> kShift) + n_units;
  }

  static uint32_t nearest(uint32_t bits, float factor) {
    const float v = float_of(bits & kMagnitude) * factor;
    const uint32_t two = binade(bits_of(v));
    // A float of this binade has the element's unit as its last place: the sum is rounded.
    const uint32_t base = two + (kShift << 23);
    const uint32_t n_units = bits_of(v + float_of(base)) - base;
    const uint32_t code = code_of(two, n_units);
    // Rounding up exceeds the largest by at most one, if no code after it is NaN.
    if constexpr (!kHasNan) return (code - (code >> kSignBit)) | sign(bits);
    return lesser(code, kLargestCode) | sign(bits);
  }

  // `coarse`, 0 or all ones: see Mx::round_block_stochastic.
  static uint32_t at_random(uint32_t bits, float factor, uint32_t random, uint32_t coarse) {
    const float v = float_of(bits & kMagnitude) * factor;
    const uint32_t clamped = clamp(bits_of(v), kLargestBits);
    const uint32_t two = binade(clamped);
    // v in units, with 27 bits behind the point: below 2^31.
    const float scaled = float_of(clamped) * float_of((kPointShift << 23) - two);
    const auto fixed = static_cast<uint32_t>(static_cast<int32_t>(scaled));
    if constexpr (!kHasNan) return code_of(two, (fixed + (random >> 5)) >> 27) | sign(bits);
    const uint32_t is_top = coarse & all_ones_if_less(kLargestBits - (1U << 23), clamped);
    const uint32_t n_units = (chosen(is_top, fixed >> 1, fixed) + (random >> 5)) >> 27;
    return code_of(two, n_units + (n_units & is_top)) | sign(bits);
  }
  static constexpr uint32_t kPointShift = 2 * 127 + 27 + kFraction;
  static uint32_t sign(uint32_t bits) { return (bits >> 31) << kSignBit; }

  // The lesser of two: an exact subtraction for numbers below 2^kLeast, which gives too much for
  // all others, and a formula for the numbers from there on, which gives too much for those below.
  static uint32_t decoded(uint32_t code) {
    const uint32_t shifted = (code & kCodeMask) << kShift;
    const float below = float_of(shifted + kLeastBits) - float_of(kLeastBits);
    return lesser(bits_of(below), shifted + kBeforeLeast) | (code >> kSignBit) << 31;
  }
  static uint32_t is_nan(uint32_t code) {
    return kHasNan ? all_ones_if_less(kLargestCode, code & kCodeMask) : 0;
  }
};

using E4m3 = SmallFloat<3, -6, 8, 0x7e, 8>;
using E2m1 = SmallFloat<1, 0, 2, 7, 4>;

// Two's complement in units of 2^-6, without -128.
struct Int8 {
  static constexpr uint32_t kBits = 8;
  static constexpr uint32_t kTopExponent = 0;
  static constexpr uint32_t kUnits = 6;
  static constexpr bool kHasNan = false;
  static constexpr float kLargest = 127;

  static uint32_t nearest(uint32_t bits, float factor) {
    const float v = float_of(bits) * factor;
    const auto code = static_cast<int32_t>(bits_of(v + 0x1.8p23F) - bits_of(0x1.8p23F));
    const int32_t below = code < 127 ? code : 127;
    return static_cast<uint32_t>(below > -127 ? below : -127);
  }
  static uint32_t at_random(uint32_t bits, float factor, uint32_t random, uint32_t) {
    const float v = float_of(bits & kMagnitude) * factor;
    const float clamped = float_of(clamp(bits_of(v), bits_of(kLargest)));
    const auto fixed = static_cast<uint32_t>(static_cast<int32_t>(clamped * 0x1p24F));
    const uint32_t magnitude = (fixed + (random >> 8)) >> 24;
    const uint32_t negative = 0 - (bits >> 31);
    return (magnitude ^ negative) - negative;
  }
  static uint32_t decoded(uint32_t code) {
    return bits_of(static_cast<float>(static_cast<int32_t>(static_cast<int8_t>(code))));
  }
  static uint32_t is_nan(uint32_t) { return 0; }
};

// ---- blocks

template <class Element>
struct Mx {
  static constexpr size_t kElemBytes = kMxBlock * Element::kBits / 8;
  static constexpr size_t kBytes = 1 + kElemBytes;
  static constexpr size_t kFloatBytes = kMxBlock * sizeof(float);
  using Words = Plain<uint32_t>;
  static constexpr uint32_t kTopScale = 254 - Element::kTopExponent;

  static size_t bytes_of(const Narrow&, size_t n_elems) {
    const size_t rest = n_elems % kMxBlock;
    return n_elems / kMxBlock * kBytes + (rest > 0 ? rest_bytes(rest) : 0);
  }
  static size_t rest_bytes(size_t n_elems) { return 1 + (n_elems * Element::kBits + 7) / 8; }

  static uint32_t largest_magnitude(const Words* elems) {
    int32_t largest = 0;
    for (size_t i = 0; i < kMxBlock; ++i) {
      const auto magnitude = static_cast<int32_t>(elems[i].value & kMagnitude);
      largest = magnitude > largest ? magnitude : largest;
    }
    return static_cast<uint32_t>(largest);
  }
  static uint32_t scale_of(uint32_t largest) {
    const uint32_t exponent = largest >> 23;
    return exponent > Element::kTopExponent ? exponent - Element::kTopExponent : 0;
  }
  // The factor that divides by a scale: for all plain scales, and for blocks of zeros.
  static float factor_of(uint32_t scale) {
    const uint32_t exponent = 254 + Element::kUnits - scale;
    return power(exponent < 254 ? exponent : 254);
  }

  // NOT a copy of a block to the stack first: the compiler copies 16 bytes at a time, and a load of
  // 32 waits until both are in the cache.
  static void encode_block(std::byte* out, const std::byte* in) {
    const auto* from = reinterpret_cast<const Words*>(in);
    const uint32_t largest = largest_magnitude(from);
    if (largest >= kInfinityBits) {
      __builtin_memset(out, 0, kBytes);
      out[0] = static_cast<std::byte>(kNanScale);
      return;
    }
    uint32_t scale = scale_of(largest);
    out[0] = static_cast<std::byte>(scale);
    Words raised[kMxBlock];
    if ((scale < kLeastPlainScale) & (largest > 0)) {
      for (size_t i = 0; i < kMxBlock; ++i) raised[i].value = lifted(from[i].value);
      from = raised;
      scale += kLift;
    }
    encode_elems(reinterpret_cast<Plain<uint8_t>*>(out + 1), from, factor_of(scale));
  }
  static void encode_elems(Plain<uint8_t>* out, const Words* in, float factor) {
    if constexpr (Element::kBits == 8) {
      SHOAL_INDEPENDENT
      for (size_t i = 0; i < kMxBlock; ++i)
        out[i].value = static_cast<uint8_t>(Element::nearest(in[i].value, factor));
    } else {
      uint8_t codes[kMxBlock];
      for (size_t i = 0; i < kMxBlock; ++i)
        codes[i] = static_cast<uint8_t>(Element::nearest(in[i].value, factor));
      // Eight at a time in one word, NOT pairs: SSE2 would split those one by one.
      for (size_t i = 0; i < kMxBlock; i += 8) {
        uint64_t word;
        __builtin_memcpy(&word, codes + i, sizeof word);
        word = (word | word >> 4) & 0x00ff00ff00ff00ff;
        word = (word | word >> 8) & 0x0000ffff0000ffff;
        reinterpret_cast<Plain<uint32_t>*>(out)[i / 8].value =
            static_cast<uint32_t>(word | word >> 16);
      }
    }
  }

  // out = left + decoded(in) if there is a left, else decoded(in).
  template <bool kAdds>
  static void decode_block(std::byte* out, const std::byte* left, const std::byte* in) {
    const auto* codes = reinterpret_cast<const Plain<uint8_t>*>(in + 1);
    Plain<uint16_t> pairs[kMxBlock / 2];
    if constexpr (Element::kBits == 4) {
      for (size_t i = 0; i < kElemBytes; ++i) {
        const uint32_t pair = codes[i].value;
        pairs[i].value = static_cast<uint16_t>((pair | pair << 4) & 0x0f0f);
      }
      codes = reinterpret_cast<const Plain<uint8_t>*>(pairs);
    }
    auto* const into = reinterpret_cast<Plain<float>*>(out);
    const auto* const to = reinterpret_cast<const Plain<float>*>(left);
    const auto scale = static_cast<uint32_t>(in[0]);
    if (scale - kLeastPlainScale < kNanScale - kLeastPlainScale && !has_nan(codes)) {
      const float factor = power(scale - Element::kUnits);
      SHOAL_INDEPENDENT
      for (size_t i = 0; i < kMxBlock; ++i) {
        const float value = float_of(Element::decoded(codes[i].value)) * factor;
        into[i].value = kAdds ? to[i].value + value : value;
      }
      return;
    }
    uint32_t values[kMxBlock];
    decode_rare(values, codes, scale);
    SHOAL_INDEPENDENT
    for (size_t i = 0; i < kMxBlock; ++i)
      into[i].value = kAdds ? to[i].value + float_of(values[i]) : float_of(values[i]);
  }
  // A byte of E4M3 is NaN if one more carries into its sign.
  static bool has_nan(const Plain<uint8_t>* codes) {
    if constexpr (!Element::kHasNan) return false;
    uint64_t carries = 0;
    for (size_t i = 0; i < kMxBlock; i += 8) {
      uint64_t eight;
      __builtin_memcpy(&eight, codes + i, sizeof eight);
      carries |= (eight & 0x7f7f7f7f7f7f7f7f) + 0x0101010101010101;
    }
    return (carries & 0x8080808080808080) != 0;
  }
  // Scales near 2^-127, scales and elements that are NaN.
  static void decode_rare(uint32_t* values, const Plain<uint8_t>* codes, uint32_t scale) {
    const bool is_tiny = scale < kLeastPlainScale;
    const uint32_t all_nan = scale == kNanScale ? ~0U : 0;
    const float factor = power((is_tiny ? scale + kLift : scale) - Element::kUnits);
    for (size_t i = 0; i < kMxBlock; ++i) {
      const uint32_t value = bits_of(float_of(Element::decoded(codes[i].value)) * factor);
      values[i] = chosen(all_nan | Element::is_nan(codes[i].value), kQuietNan, value);
    }
    if (is_tiny)  // lowering would turn a NaN into a number
      for (size_t i = 0; i < kMxBlock; ++i)
        values[i] = chosen(Element::is_nan(codes[i].value), kQuietNan, lowered(values[i]));
  }

  // Rounds with a scale that no element exceeds, up to the format's largest: the one of encode(),
  // or the next if an element would clamp. Encoding with the lower scale has to keep the result,
  // also where all elements were rounded down. Only E4M3 has a number that is lost then, 240 under
  // the next scale, 480 under the lower: such elements are rounded `coarse`, to 224 or 256.
  static void round_block_stochastic(std::byte* data, uint32_t salt, uint32_t first) {
    auto* const elems = reinterpret_cast<Words*>(data);
    uint32_t largest = largest_magnitude(elems);
    if (largest >= kInfinityBits) {
      for (size_t i = 0; i < kMxBlock; ++i) elems[i].value = kQuietNan;
      return;
    }
    uint32_t scale = scale_of(largest);
    const bool may_be_next = scale < kTopScale;
    const bool is_tiny = (scale < kLeastPlainScale) & (largest > 0);
    if (is_tiny) {
      for (size_t i = 0; i < kMxBlock; ++i) elems[i].value = lifted(elems[i].value);
      largest = lifted(largest);
      scale += kLift;
    }
    const uint32_t is_next =
        (may_be_next & (float_of(largest) * factor_of(scale) > Element::kLargest)) ? 1 : 0;
    scale += is_next;
    const float factor = factor_of(scale);
    const float back = power((largest > 0 ? scale : 127) - Element::kUnits);
    for (size_t i = 0; i < kMxBlock; ++i) {
      const uint32_t random = random_bits(salt, first + static_cast<uint32_t>(i));
      const uint32_t code = Element::at_random(elems[i].value, factor, random, 0 - is_next);
      elems[i].value = bits_of(float_of(Element::decoded(code)) * back);
    }
    if (is_tiny)
      for (size_t i = 0; i < kMxBlock; ++i) elems[i].value = lowered(elems[i].value);
  }

  // ---- runs of blocks: the last one is filled up with zeros

  static void encode(const Narrow&, std::byte* out, const std::byte* in, size_t n_elems) {
    for (; n_elems >= kMxBlock; n_elems -= kMxBlock) {
      encode_block(out, in);
      out += kBytes;
      in += kFloatBytes;
    }
    if (n_elems == 0) return;
    std::byte elems[kFloatBytes] = {};
    std::byte block[kBytes];
    __builtin_memcpy(elems, in, n_elems * sizeof(float));
    encode_block(block, elems);
    __builtin_memcpy(out, block, rest_bytes(n_elems));
  }

  template <bool kAdds>
  static void decode_run(std::byte* out, const std::byte* left, const std::byte* in,
                         size_t n_elems) {
    for (; n_elems >= kMxBlock; n_elems -= kMxBlock) {
      decode_block<kAdds>(out, left, in);
      out += kFloatBytes;
      in += kBytes;
      if constexpr (kAdds) left += kFloatBytes;
    }
    if (n_elems == 0) return;
    std::byte elems[kFloatBytes] = {};
    std::byte block[kBytes] = {};
    __builtin_memcpy(block, in, rest_bytes(n_elems));
    if constexpr (kAdds) __builtin_memcpy(elems, left, n_elems * sizeof(float));
    decode_block<kAdds>(elems, elems, block);
    __builtin_memcpy(out, elems, n_elems * sizeof(float));
  }
  static void decode(const Narrow&, std::byte* out, const std::byte* in, size_t n_elems) {
    decode_run<false>(out, nullptr, in, n_elems);
  }
  static void fold(const Narrow&, std::byte* out, const std::byte* a, const std::byte* b,
                   size_t n_elems) {
    decode_run<true>(out, a, b, n_elems);
  }

  static void round_stochastic(const Narrow&, std::byte* data, size_t n_elems, uint64_t seed,
                               uint64_t first) {
    const uint32_t salt = salt_of(seed);
    for (; n_elems >= kMxBlock; n_elems -= kMxBlock) {
      round_block_stochastic(data, salt, static_cast<uint32_t>(first));
      data += kFloatBytes;
      first += kMxBlock;
    }
    if (n_elems == 0) return;
    std::byte elems[kFloatBytes] = {};
    __builtin_memcpy(elems, data, n_elems * sizeof(float));
    round_block_stochastic(elems, salt, static_cast<uint32_t>(first));
    __builtin_memcpy(data, elems, n_elems * sizeof(float));
  }

  static constexpr Narrow kSums = {
      kMxBlock,        0, bytes_of, encode, decode, fold, round_by_encoding<encode, decode>,
      round_stochastic};
};

}  // namespace
}  // namespace shoal
