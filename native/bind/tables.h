// What Python reads of the core's own numbers, so that none is written down twice.
#pragma once

#include <nanobind/nanobind.h>

namespace shoal {

void bind_tables(nanobind::module_& m);

}  // namespace shoal
