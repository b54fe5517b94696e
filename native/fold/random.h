// Random bits by counter, for the kernel sources only (see loops.h on why all is unnamed).
#pragma once

#include <cstdint>

namespace shoal {
namespace {

// A permutation of 32 bits in which each bit of the result depends on all of `x`. Multiplications
// of 32 bits only, which every vector unit has.
//
// Source: C. Wellons, "Prospecting for hash functions" (2018), lowbias32.
inline uint32_t mixed(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352d;
  x = (x ^ (x >> 15)) * 0x846ca68b;
  return x ^ (x >> 16);
}

// The part of `random_bits` that depends on the seed alone: compute it once, before the loop.
inline uint32_t salt_of(uint64_t seed) {
  return mixed(static_cast<uint32_t>(seed) ^ mixed(static_cast<uint32_t>(seed >> 32) + 0x9e3779b9));
}

// The random bits of the element with this index. They repeat after 2^32 elements.
inline uint32_t random_bits(uint32_t salt, uint64_t index) {
  return mixed(static_cast<uint32_t>(index) * 0x9e3779b9 ^ salt);
}

}  // namespace
}  // namespace shoal
