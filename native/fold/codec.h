// Codecs: how the elements of a flow travel between hosts, as they are or narrower.
//
// src/shoal/codec.py is held to them by a test; they are wire format: NEVER renumber, only append.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fold/dtype.h"
#include "fold/fold.h"

namespace shoal {

enum class Codec : uint8_t { kIdentity = 0, kBfloat16 = 1 };

inline constexpr size_t kCodecs = 2;

// Ask this before casting a number that Python wrote.
constexpr bool is_codec(uint64_t number) { return number < kCodecs; }

// Threads and buffers: as fold.h. No alignment is needed; what is encoded and what is decoded do
// not overlap.
using ConvertFn = void (*)(std::byte* out, const std::byte* in, size_t n_elems);
using RoundFn = void (*)(std::byte* data, size_t n_elems);

// What a narrow codec does with elements of one type. Every instruction set gives the same bits.
//
// Encoding rounds to nearest, ties to even; beyond the largest finite value that is infinity, a NaN
// stays a NaN (made quiet), denormals are kept. Encoding what was decoded changes nothing.
struct Narrow {
  size_t item_bytes;  // of an element on the wire
  ConvertFn encode;
  ConvertFn decode;
  FoldFn fold;    // out[i] = a[i] op decoded(b[i]), in one pass; `out` may be `a`
  RoundFn round;  // data[i] = decoded(encoded(data[i]))
};

// nullptr for the identity, and where a codec has no meaning: all but float32 sums (kAvg folds as
// kSum).
const Narrow* narrow_for(Codec codec, DType dtype, FoldOp op);

}  // namespace shoal
