// The core's constants that Python reads, so that none is written twice.
#pragma once

#include <nanobind/nanobind.h>

namespace shoal {

void bind_tables(nanobind::module_& m);

}  // namespace shoal
