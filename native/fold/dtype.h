// The element types and fold operations, by the numbers that programs and frames carry.
//
// src/shoal/dtypes.py holds the same numbers; they are wire format: NEVER renumber, only append.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal {

enum class DType : uint8_t {
  kFloat32 = 0,
  kFloat64 = 1,
  kFloat16 = 2,
  kBfloat16 = 3,
  kInt8 = 4,
  kInt16 = 5,
  kInt32 = 6,
  kInt64 = 7,
  kUint8 = 8,
  kBool = 9,
  kComplex64 = 10,
  kComplex128 = 11,
  kUint16 = 12,
  kUint32 = 13,
  kUint64 = 14,
};

enum class FoldOp : uint8_t {
  kSum = 0,
  kAvg = 1,  // folds as kSum; divide() once on the finished value
  kProduct = 2,
  kMin = 3,
  kMax = 4,
  kBand = 5,
  kBor = 6,
  kBxor = 7,
};

inline constexpr size_t kDTypes = 15;
inline constexpr size_t kFoldOps = 8;

// Ask these before casting a number that Python or a peer wrote.
constexpr bool is_dtype(uint64_t number) { return number < kDTypes; }
constexpr bool is_fold_op(uint64_t number) { return number < kFoldOps; }

// Bytes of one element; 0 for a number that names no type.
constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kInt8:
    case DType::kUint8:
    case DType::kBool:
      return 1;
    case DType::kFloat16:
    case DType::kBfloat16:
    case DType::kInt16:
    case DType::kUint16:
      return 2;
    case DType::kFloat32:
    case DType::kInt32:
    case DType::kUint32:
      return 4;
    case DType::kFloat64:
    case DType::kInt64:
    case DType::kUint64:
    case DType::kComplex64:
      return 8;
    case DType::kComplex128:
      return 16;
  }
  return 0;
}

// For messages; "?" for a number that names nothing.
constexpr const char* name_of(DType dtype) {
  constexpr const char* kNames[kDTypes] = {
      "float32", "float64", "float16",   "bfloat16",   "int8",   "int16",  "int32", "int64",
      "uint8",   "bool",    "complex64", "complex128", "uint16", "uint32", "uint64"};
  const auto number = static_cast<size_t>(dtype);
  return number < kDTypes ? kNames[number] : "?";
}

constexpr const char* name_of(FoldOp op) {
  constexpr const char* kNames[kFoldOps] = {"sum", "avg",  "product", "min",
                                            "max", "band", "bor",     "bxor"};
  const auto number = static_cast<size_t>(op);
  return number < kFoldOps ? kNames[number] : "?";
}

}  // namespace shoal
