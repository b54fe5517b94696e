// The table of fold kernels that one instruction set fills.
//
// The tables are reached through fold.h; only fold.cc and the tests, which compare them, look here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "fold/codec.h"
#include "fold/dtype.h"
#include "fold/fold.h"

namespace shoal {

using DivideFn = void (*)(std::byte* data, size_t n_elems, uint32_t divisor);

struct Kernels {
  const char* isa;
  FoldFn fold[kDTypes][kFoldOps];  // nullptr: the pair has no meaning
  DivideFn divide[kDTypes];        // nullptr: bool
  Narrow narrow[kCodecs];          // of float32; without functions: an unknown codec
};

extern const Kernels kBaselineKernels;
extern const Kernels kAvx2Kernels;    // x86-64 only
extern const Kernels kAvx512Kernels;  // x86-64 only

// The tables this CPU can run, slowest first.
std::span<const Kernels* const> kernels_here();

}  // namespace shoal
