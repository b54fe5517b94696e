// Fold: combine two runs of elements into one.
//
// Threads: any; every function here is pure except the first call, which picks the instruction set.
// Buffers: borrowed for the call. No alignment is needed. `out` may be exactly `a`; any other
// overlap
// of `out` with `a` or `b` is a bug of the caller.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fold/dtype.h"

namespace shoal {

// out[i] = a[i] op b[i] for n_elems elements; to fold in place pass the accumulator as out and a.
using FoldFn = void (*)(std::byte* out, const std::byte* a, const std::byte* b, size_t n_elems);

// The fold of this pair, or nullptr where it has no meaning: band/bor/bxor of floats and complex,
// min/max of complex, avg of bool, and unknown numbers.
//
// Every instruction set gives the same bits (only which of two NaN payloads survives is open).
// Integers wrap. bool: sum, max and bor are "or"; product, min and band are "and"; results are 0 or
// 1. min and max give NaN if either side is NaN, and `b` when both compare equal (-0 and +0).
// float16 and bfloat16 compute in float32 and round once, to nearest, ties to even.
FoldFn fold_function(DType dtype, FoldOp op);

// data[i] /= divisor: the division of kAvg, once per finished value. divisor >= 1.
//
// Floats: a true division (float16 and bfloat16 through float32); complex: both parts; integers:
// truncated toward zero; bool: unchanged (avg of bool has no meaning).
void divide(DType dtype, std::byte* data, size_t n_elems, uint32_t divisor);

// The instruction set in use: "avx512", "avx2" or "baseline".
//
// The best this CPU has, unless SHOAL_ISA=baseline|avx2|avx512 in the environment, read at the
// first call, names a lower one. A value that is unknown or above the CPU's is ignored.
const char* fold_isa();

}  // namespace shoal
