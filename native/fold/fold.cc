#include "fold/fold.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdlib>
#include <string_view>

#include "fold/kernels.h"

namespace shoal {
namespace {

// The flags that fold_avx2.cc and fold_avx512.cc are compiled with, NOT only the one in their name.
#if defined(__x86_64__)
constexpr const Kernels* kTables[] = {&kBaselineKernels, &kAvx2Kernels, &kAvx512Kernels};

// NOT __builtin_cpu_supports("f16c"): Clang 16 and older do not know that name.
bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

size_t n_runnable() {
  const bool avx2 = __builtin_cpu_supports("avx2") && has_f16c() && __builtin_cpu_supports("fma");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!avx2) return 1;
  return avx512 ? 3 : 2;
}
#else
constexpr const Kernels* kTables[] = {&kBaselineKernels};

size_t n_runnable() { return 1; }
#endif

const Kernels& chosen() {
  static const Kernels* const kChosen = [] {
    const char* const wanted = std::getenv("SHOAL_ISA");
    for (const Kernels* table : kernels_here()) {
      if (wanted != nullptr && std::string_view(wanted) == table->isa) return table;
    }
    return kernels_here().back();
  }();
  return *kChosen;
}

}  // namespace

std::span<const Kernels* const> kernels_here() { return {kTables, n_runnable()}; }

FoldFn fold_function(DType dtype, FoldOp op) {
  const auto row = static_cast<size_t>(dtype);
  const auto column = static_cast<size_t>(op);
  if (!is_dtype(row) || !is_fold_op(column)) return nullptr;
  return chosen().fold[row][column];
}

void divide(DType dtype, std::byte* data, size_t n_elems, uint32_t divisor) {
  const auto row = static_cast<size_t>(dtype);
  if (!is_dtype(row) || chosen().divide[row] == nullptr) return;
  chosen().divide[row](data, n_elems, divisor);
}

std::optional<Narrow> narrow_for(Codec codec, DType dtype, FoldOp op, uint32_t keep) {
  const bool sums = dtype == DType::kFloat32 && (op == FoldOp::kSum || op == FoldOp::kAvg);
  Narrow narrow = chosen().narrow[static_cast<size_t>(codec)];
  if (!sums || narrow.encode == nullptr) return std::nullopt;
  narrow.keep = keep;
  return narrow;
}

const char* fold_isa() { return chosen().isa; }

}  // namespace shoal
