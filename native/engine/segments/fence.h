// Takes memory of a failed call away from peers that may still use it.
#pragma once

#include <cstddef>

#include "base/shared_memory.h"

namespace shoal {

// The owner gets this memory back. If the kernel refuses to fence it, results could be silently
// wrong, so the process ends.
inline void take_away(const std::byte* data, size_t n_bytes, Regions::Against against) {
  Error error = Regions::of_process().fence(data, n_bytes, against);
  if (!error) return;
  error.text = "memory of a failed call cannot be taken away from a peer that may still use it: " +
               error.text;
  end_process(error);
}

}  // namespace shoal
