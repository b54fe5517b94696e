#pragma once

#include <nanobind/nanobind.h>

namespace shoal {

void bind_endpoint(nanobind::module_& m);

}  // namespace shoal
