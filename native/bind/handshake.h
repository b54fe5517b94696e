#pragma once

#include <nanobind/nanobind.h>

namespace shoal {

void bind_handshake(nanobind::module_& m);

}  // namespace shoal
