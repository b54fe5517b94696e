// The element types and fold operations, by the numbers that programs and frames carry.
//
// src/shoal/dtypes.py is held to them by a test; they are wire format: NEVER renumber, only append.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal {

// The enumerator without its k, the name in messages and the bytes of an element, by number.
#define SHOAL_DTYPES(X)           \
  X(Float32, "float32", 4)        \
  X(Float64, "float64", 8)        \
  X(Float16, "float16", 2)        \
  X(Bfloat16, "bfloat16", 2)      \
  X(Int8, "int8", 1)              \
  X(Int16, "int16", 2)            \
  X(Int32, "int32", 4)            \
  X(Int64, "int64", 8)            \
  X(Uint8, "uint8", 1)            \
  X(Bool, "bool", 1)              \
  X(Complex64, "complex64", 8)    \
  X(Complex128, "complex128", 16) \
  X(Uint16, "uint16", 2)          \
  X(Uint32, "uint32", 4)          \
  X(Uint64, "uint64", 8)
// The same without bytes. kAvg folds as kSum; divide() once on the finished value.
#define SHOAL_FOLD_OPS(X) \
  X(Sum, "sum")           \
  X(Avg, "avg")           \
  X(Product, "product")   \
  X(Min, "min")           \
  X(Max, "max")           \
  X(Band, "band")         \
  X(Bor, "bor")           \
  X(Bxor, "bxor")

#define SHOAL_ENUMERATOR(Name, ...) k##Name,
#define SHOAL_COUNTED(...) +1
enum class DType : uint8_t { SHOAL_DTYPES(SHOAL_ENUMERATOR) };
enum class FoldOp : uint8_t { SHOAL_FOLD_OPS(SHOAL_ENUMERATOR) };

inline constexpr size_t kDTypes = SHOAL_DTYPES(SHOAL_COUNTED);
inline constexpr size_t kFoldOps = SHOAL_FOLD_OPS(SHOAL_COUNTED);
#undef SHOAL_ENUMERATOR
#undef SHOAL_COUNTED

// Ask these before casting a number that Python or a peer wrote.
constexpr bool is_dtype(uint64_t number) { return number < kDTypes; }
constexpr bool is_fold_op(uint64_t number) { return number < kFoldOps; }

#define SHOAL_BYTES(Name, text, n_bytes) n_bytes,
#define SHOAL_TEXT(Name, text, ...) text,
// Bytes of one element; 0 for a number that names no type.
constexpr size_t size_of(DType dtype) {
  constexpr size_t kSizes[] = {SHOAL_DTYPES(SHOAL_BYTES)};
  const auto number = static_cast<size_t>(dtype);
  return number < kDTypes ? kSizes[number] : 0;
}

// For messages; "?" for an unknown number.
constexpr const char* name_of(DType dtype) {
  constexpr const char* kNames[] = {SHOAL_DTYPES(SHOAL_TEXT)};
  const auto number = static_cast<size_t>(dtype);
  return number < kDTypes ? kNames[number] : "?";
}

constexpr const char* name_of(FoldOp op) {
  constexpr const char* kNames[] = {SHOAL_FOLD_OPS(SHOAL_TEXT)};
  const auto number = static_cast<size_t>(op);
  return number < kFoldOps ? kNames[number] : "?";
}
#undef SHOAL_BYTES
#undef SHOAL_TEXT

}  // namespace shoal
