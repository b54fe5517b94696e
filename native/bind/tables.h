// The core's constants that Python reads, so that each is defined only once.
#pragma once

#include <nanobind/nanobind.h>

namespace shoal {

void bind_tables(nanobind::module_& m);

}  // namespace shoal
