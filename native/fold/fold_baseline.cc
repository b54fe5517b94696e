// The kernels for the plain target of the build (SSE2 on x86-64, NEON on arm64).
#include "fold/loops.h"

namespace shoal {

constinit const Kernels kBaselineKernels = table("baseline");

}  // namespace shoal
