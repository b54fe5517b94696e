// The loops of the codecs that keep the largest elements of a chunk, for the kernel sources only
// (loops.h explains the unnamed namespace).
//
// Chunks of 4096 and indices of 12 bits are SparseLoCo's (arXiv 2508.15706). A chunk is a scale
// byte (E8M0, as in mx_loops.h), the indices, ascending, and the values, of 8 or 2 bits.
// docs/wire.md has the bytes, docs/decisions/0074 the reasons.
//
// The number of entries depends on the number of elements alone. If fewer are left after rounding,
// the last index is repeated; an entry whose index is not above the previous one is ignored, so
// that bytes of any kind have one meaning.
#pragma once

#include "fold/codec.h"
#include "fold/half.h"
#include "fold/mx_loops.h"
#include "fold/plain.h"

namespace shoal {
namespace {

inline constexpr size_t kChunk = 4096;

// INT8 in units of 2^-6, as in MX. `v` is a magnitude divided by the scale, below 2.
struct EightBits {
  static constexpr uint32_t kBits = 8;
  // The bits of the largest float that rounds to zero: 2^-7.
  static uint32_t largest_dropped(uint32_t scale) { return (scale - 7) << 23; }
  static uint32_t code(uint32_t bits, uint32_t scale) {
    return Int8::nearest(bits, Mx<Int8>::factor_of(scale)) & 0xff;
  }
  static float decoded(uint32_t code, uint32_t scale) {
    return float_of(Int8::decoded(code)) * power(scale - Int8::kUnits);
  }
};

// A sign and one of two magnitudes, 3/4 and 3/2: twice the lower under the next lower scale is the
// upper, so that a chunk without an upper one is encoded again to the same values.
struct TwoBits {
  static constexpr uint32_t kBits = 2;
  // The nearest of 0, 3/4 and 3/2, and of two equally near the lower: beyond 3/8, beyond 9/8.
  static uint32_t largest_dropped(uint32_t scale) { return (scale - 2) << 23 | 0x400000; }
  static uint32_t code(uint32_t bits, uint32_t scale) {
    const uint32_t is_upper = (bits & kMagnitude) > (scale << 23 | 0x100000) ? 1 : 0;
    return (bits >> 31) << 1 | is_upper;
  }
  static float decoded(uint32_t code, uint32_t scale) {
    const uint32_t exponent = scale - 1 + (code & 1);
    return float_of((code >> 1) << 31 | exponent << 23 | 0x400000);
  }
};

// The bits of the least magnitude that is sent: 1.5 * 2^-98. No operation meets a denormal, and
// both formats keep a chunk whose largest element is this one.
inline constexpr uint32_t kLeastLargest = 29 << 23 | 0x400000;
inline constexpr uint32_t kLeastChunkScale = 29;

// Buckets of magnitudes by their distance below the largest, in eighths of a power of two. The last
// one has all magnitudes that are too small for either format.
inline constexpr uint32_t kBuckets = 128;
inline constexpr uint32_t kBucketShift = 20;

// The elements of a chunk that are kept: those above a magnitude, and the first that equal it.
struct Cut {
  uint32_t magnitude;
  size_t n_equal;
};

struct Selection {
  uint8_t buckets[kChunk];
  uint16_t found[kChunk];  // the elements in the buckets down to the last needed one
  uint32_t edge[kChunk];   // the magnitudes in that bucket
  size_t n_found = 0;
  size_t n_edge = 0;
};

inline void fill_buckets(Selection& selection, const Plain<uint32_t>* elems, size_t n_elems,
                         uint32_t largest) {
  const uint32_t top = largest >> kBucketShift;
  SHOAL_INDEPENDENT
  for (size_t i = 0; i < n_elems; ++i) {
    const uint32_t below = top - ((elems[i].value & kMagnitude) >> kBucketShift);
    selection.buckets[i] = static_cast<uint8_t>(lesser(below, kBuckets - 1));
  }
}

// The first bucket with which at least `n_wanted` are counted, or the last but one; `n_before`: the
// elements in those before it. Four counts each: one that was just increased is slow to read.
inline uint32_t last_bucket(const Selection& selection, size_t n_elems, size_t n_wanted,
                            size_t& n_before) {
  uint16_t counts[4][kBuckets] = {};
  for (size_t i = 0; i < n_elems; ++i) ++counts[i % 4][selection.buckets[i]];
  n_before = 0;
  for (uint32_t bucket = 0; bucket < kBuckets - 2; ++bucket) {
    const size_t n = static_cast<size_t>(counts[0][bucket]) + counts[1][bucket] +
                     counts[2][bucket] + counts[3][bucket];
    if (n_before + n >= n_wanted) return bucket;
    n_before += n;
  }
  return kBuckets - 2;
}

inline void find_candidates(Selection& selection, const Plain<uint32_t>* elems, size_t n_elems,
                            uint32_t last) {
  constexpr size_t kGroup = 32;
  for (size_t start = 0; start < n_elems; start += kGroup) {
    const size_t end = start + kGroup < n_elems ? start + kGroup : n_elems;
    if (end == start + kGroup) {  // most groups have none
      uint8_t least = kBuckets;
      for (size_t i = 0; i < kGroup; ++i) {
        const uint8_t bucket = selection.buckets[start + i];
        least = bucket < least ? bucket : least;
      }
      if (least > last) continue;
    }
    for (size_t i = start; i < end; ++i) {
      if (selection.buckets[i] > last) continue;
      selection.found[selection.n_found++] = static_cast<uint16_t>(i);
      if (selection.buckets[i] == last)
        selection.edge[selection.n_edge++] = elems[i].value & kMagnitude;
    }
  }
}

inline size_t count_from(const Selection& selection, uint32_t magnitude) {
  uint32_t n = 0;
  for (size_t i = 0; i < selection.n_edge; ++i)
    n += static_cast<int32_t>(selection.edge[i]) >= static_cast<int32_t>(magnitude) ? 1 : 0;
  return n;
}

// The `n_wanted`-th largest of the edge, bit by bit.
inline Cut cut_of_edge(const Selection& selection, size_t n_wanted) {
  uint32_t magnitude = 0;
  for (uint32_t bit = 1U << 30; bit > 0; bit >>= 1)
    if (count_from(selection, magnitude | bit) >= n_wanted) magnitude |= bit;
  return {magnitude, n_wanted - count_from(selection, magnitude + 1)};
}

// Write the indices of the `n_wanted` largest magnitudes above `dropped` to `kept`, ascending;
// among equal ones the first. Returns their number.
inline size_t select_largest(uint16_t* kept, const Plain<uint32_t>* elems, size_t n_elems,
                             uint32_t largest, uint32_t dropped, size_t n_wanted) {
  Selection selection;
  size_t n_before;
  fill_buckets(selection, elems, n_elems, largest);
  const uint32_t last = last_bucket(selection, n_elems, n_wanted, n_before);
  find_candidates(selection, elems, n_elems, last);
  Cut cut = {dropped, 0};
  if (n_before + selection.n_edge > n_wanted) cut = cut_of_edge(selection, n_wanted - n_before);
  if (cut.magnitude <= dropped) cut = {dropped, 0};
  size_t n_kept = 0;
  for (size_t i = 0; i < selection.n_found; ++i) {
    const uint16_t index = selection.found[i];
    const uint32_t magnitude = elems[index].value & kMagnitude;
    const bool is_first = magnitude == cut.magnitude && cut.n_equal > 0;
    if (is_first) --cut.n_equal;
    if (is_first || magnitude > cut.magnitude) kept[n_kept++] = index;
  }
  return n_kept;
}

template <class Value>
struct TopK {
  using Words = Plain<uint32_t>;

  static size_t n_entries(const Narrow& codec, size_t n_elems) {
    const size_t keep = codec.keep < kChunk ? codec.keep : kChunk;
    const size_t n = (keep * n_elems + kChunk - 1) / kChunk;
    return n > 0 ? n : 1;
  }
  static size_t index_bytes(size_t n_entries) { return (12 * n_entries + 7) / 8; }
  static size_t chunk_bytes(size_t n_entries) {
    return 1 + index_bytes(n_entries) + (Value::kBits * n_entries + 7) / 8;
  }
  static size_t bytes_of(const Narrow& codec, size_t n_elems) {
    const size_t rest = n_elems % kChunk;
    const size_t n_whole = n_elems / kChunk * chunk_bytes(n_entries(codec, kChunk));
    return n_whole + (rest > 0 ? chunk_bytes(n_entries(codec, rest)) : 0);
  }

  static uint32_t largest_magnitude(const Words* elems, size_t n_elems) {
    uint32_t largest = 0;
    for (size_t i = 0; i < n_elems; ++i) largest = greater(largest, elems[i].value & kMagnitude);
    return largest;
  }

  // A chunk with a value that is not finite is all NaN; one far below all gradients is all zeros.
  static void encode_chunk(const Narrow& codec, std::byte* out, const std::byte* in,
                           size_t n_elems) {
    const auto* const elems = reinterpret_cast<const Words*>(in);
    const size_t n = n_entries(codec, n_elems);
    const uint32_t largest = largest_magnitude(elems, n_elems);
    const uint32_t scale = largest >> 23;
    __builtin_memset(out, 0, chunk_bytes(n));
    if (largest < kLeastLargest) return;
    out[0] = static_cast<std::byte>(scale);
    if (scale == kNanScale) return;
    uint16_t kept[kChunk];
    size_t n_kept = select_largest(kept, elems, n_elems, largest, Value::largest_dropped(scale), n);
    auto* const bytes = reinterpret_cast<uint8_t*>(out + 1);
    auto* const values = bytes + index_bytes(n);
    for (size_t i = 0; i < n; ++i) {
      const uint32_t index = kept[i < n_kept ? i : n_kept - 1];
      const uint32_t shifted = index << (i % 2 * 4);
      bytes[i * 3 / 2] |= static_cast<uint8_t>(shifted);
      bytes[i * 3 / 2 + 1] |= static_cast<uint8_t>(shifted >> 8);
      const size_t bit = i * Value::kBits;
      values[bit / 8] |= static_cast<uint8_t>(Value::code(elems[index].value, scale) << (bit % 8));
    }
  }

  // Calls use(index, value) for each entry that counts.
  template <class Use>
  static void for_entries(const std::byte* in, size_t n_entries, size_t n_elems, Use use) {
    const auto scale = static_cast<uint32_t>(in[0]);
    const auto* const bytes = reinterpret_cast<const uint8_t*>(in + 1);
    const auto* const values = bytes + index_bytes(n_entries);
    size_t next = 0;
    for (size_t i = 0; i < n_entries; ++i) {
      const uint32_t two = bytes[i * 3 / 2] | static_cast<uint32_t>(bytes[i * 3 / 2 + 1]) << 8;
      const size_t index = two >> (i % 2 * 4) & 0xfff;
      if (index < next || index >= n_elems) continue;
      next = index + 1;
      const size_t bit = i * Value::kBits;
      const uint32_t code = values[bit / 8] >> (bit % 8) & ((1U << Value::kBits) - 1);
      use(index, Value::decoded(code, scale));
    }
  }

  // out = left + decoded(in) if there is a left, else decoded(in). Other elements stay.
  template <bool kAdds>
  static void decode_chunk(const Narrow& codec, std::byte* out, const std::byte* left,
                           const std::byte* in, size_t n_elems) {
    auto* const into = reinterpret_cast<Plain<float>*>(out);
    const auto scale = static_cast<uint32_t>(in[0]);
    if (scale == kNanScale) {
      for (size_t i = 0; i < n_elems; ++i) into[i].value = float_of(kQuietNan);
      return;
    }
    if (!kAdds) __builtin_memset(out, 0, n_elems * sizeof(float));
    if (kAdds && out != left) __builtin_memcpy(out, left, n_elems * sizeof(float));
    if (scale < kLeastChunkScale) return;
    for_entries(in, n_entries(codec, n_elems), n_elems, [into](size_t index, float value) {
      into[index].value = kAdds ? into[index].value + value : value;
    });
  }

  static void encode(const Narrow& codec, std::byte* out, const std::byte* in, size_t n_elems) {
    for (; n_elems > 0; in += kChunk * sizeof(float)) {
      const size_t n = n_elems < kChunk ? n_elems : kChunk;
      encode_chunk(codec, out, in, n);
      out += chunk_bytes(n_entries(codec, n));
      n_elems -= n;
    }
  }
  template <bool kAdds>
  static void decode_run(const Narrow& codec, std::byte* out, const std::byte* left,
                         const std::byte* in, size_t n_elems) {
    for (; n_elems > 0; out += kChunk * sizeof(float)) {
      const size_t n = n_elems < kChunk ? n_elems : kChunk;
      decode_chunk<kAdds>(codec, out, left, in, n);
      in += chunk_bytes(n_entries(codec, n));
      if (kAdds) left += kChunk * sizeof(float);
      n_elems -= n;
    }
  }
  static void decode(const Narrow& codec, std::byte* out, const std::byte* in, size_t n_elems) {
    decode_run<false>(codec, out, nullptr, in, n_elems);
  }
  static void fold(const Narrow& codec, std::byte* out, const std::byte* a, const std::byte* b,
                   size_t n_elems) {
    decode_run<true>(codec, out, a, b, n_elems);
  }
  static void round(const Narrow& codec, std::byte* data, size_t n_elems) {
    std::byte encoded[1 + (12 + Value::kBits) * kChunk / 8];
    for (; n_elems > 0; data += kChunk * sizeof(float)) {
      const size_t n = n_elems < kChunk ? n_elems : kChunk;
      encode_chunk(codec, encoded, data, n);
      decode_chunk<false>(codec, data, nullptr, encoded, n);
      n_elems -= n;
    }
  }
  // To nearest: the mean of what is dropped could not become its value.
  static void round_stochastic(const Narrow& codec, std::byte* data, size_t n_elems, uint64_t,
                               uint64_t) {
    round(codec, data, n_elems);
  }

  static constexpr Narrow kSums = {kChunk, 0,    bytes_of, encode,
                                   decode, fold, round,    round_stochastic};
};

}  // namespace
}  // namespace shoal
