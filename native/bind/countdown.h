// Hooks that count the entries of fusion buffers.
#pragma once

#include <nanobind/nanobind.h>

namespace shoal {

void bind_countdown(nanobind::module_& m);

}  // namespace shoal
