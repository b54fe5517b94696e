// The kernels for AVX-512 F, BW, DQ and VL.
#include "fold/loops.h"

namespace shoal {

constinit const Kernels kAvx512Kernels = table("avx512");

}  // namespace shoal
