#pragma once

#include <nanobind/nanobind.h>

#include "base/mac.h"

namespace shoal {

inline Bytes bytes_of(const nanobind::bytes& object) {
  return {reinterpret_cast<const std::byte*>(object.data()), object.size()};
}

void bind_handshake(nanobind::module_& m);

}  // namespace shoal
