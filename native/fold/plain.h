// Helpers of every loop over elements, for the kernel sources only (loops.h explains the unnamed
// namespace).
#pragma once

namespace shoal {
namespace {

// Iteration i touches element i only, even when out == a: no run-time overlap test is needed (it
// would send folds in place, the usual kind, down the scalar path).
#if defined(__clang__)
#define SHOAL_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define SHOAL_INDEPENDENT _Pragma("GCC ivdep")
#endif

// An element at any address.
template <class T>
struct __attribute__((packed, may_alias)) Plain {
  T value;
};

}  // namespace
}  // namespace shoal
