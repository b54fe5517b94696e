// Codecs: how the elements of a flow travel between hosts, as they are or narrower.
//
// src/shoal/codec.py is held to them by a test; they are wire format: NEVER renumber, only append.
// docs/wire.md has the formats byte by byte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "fold/dtype.h"

namespace shoal {

enum class Codec : uint8_t {
  kIdentity = 0,
  kBfloat16 = 1,
  kFloat16 = 2,
  kMxFp8 = 3,
  kMxInt8 = 4,
  kMxFp4 = 5,
  kTopK8 = 6,
  kTopK2 = 7,
};

inline constexpr size_t kCodecs = 8;

// Ask this before casting a number that Python wrote.
constexpr bool is_codec(uint64_t number) { return number < kCodecs; }

// A narrow codec's functions on float32. Elements are encoded in blocks, counted from the first
// element given; only the last block may be shorter. Every instruction set gives the same bits.
//
// Encoding rounds to nearest, ties to even, and encoding decoded data changes nothing.
//
// Threads and buffers: as fold.h. No alignment is needed; encoded and decoded memory must not
// overlap.
struct Narrow {
  uint32_t block;  // elements that are encoded together
  uint32_t keep;   // elements kept of a whole block, by codecs that drop some; else 0
  // The bytes on the wire of `n_elems`, whatever their values. Whole blocks add up.
  size_t (*bytes_of)(const Narrow&, size_t n_elems);
  void (*encode)(const Narrow&, std::byte* out, const std::byte* in, size_t n_elems);
  void (*decode)(const Narrow&, std::byte* out, const std::byte* in, size_t n_elems);
  // out[i] = a[i] + decoded(b)[i]; `out` may be `a`.
  void (*fold)(const Narrow&, std::byte* out, const std::byte* a, const std::byte* b,
               size_t n_elems);
  // data = decoded(encoded(data)).
  void (*round)(const Narrow&, std::byte* data, size_t n_elems);
  // Round each element up or down at random, so that its mean is its value. Encoding the result
  // changes nothing. `first`: the index of data[0] in the call's buffer; the random bits depend on
  // the seed and the index of an element alone.
  void (*round_stochastic)(const Narrow&, std::byte* data, size_t n_elems, uint64_t seed,
                           uint64_t first);
};

// Nothing for the identity, and for dtypes and operations without the codec: all but float32 sums
// (kAvg folds as kSum).
std::optional<Narrow> narrow_for(Codec codec, DType dtype, FoldOp op, uint32_t keep = 0);

}  // namespace shoal
