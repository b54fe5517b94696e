// The kernels for AVX2 and F16C.
#include "fold/loops.h"

namespace shoal {

constinit const Kernels kAvx2Kernels = table("avx2");

}  // namespace shoal
