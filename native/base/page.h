// The size of a page of memory: 4 KiB on x86-64, and 4, 16 or 64 KiB on ARM, as the kernel was
// built.
#pragma once

#include <unistd.h>

#include <cstddef>

namespace shoal {

// Every address, length and offset of a mapping at a fixed address is a multiple of it.
inline size_t page_bytes() {
  static const auto n_bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return n_bytes;
}

inline size_t whole_pages(size_t n_bytes) {
  return (n_bytes + page_bytes() - 1) / page_bytes() * page_bytes();
}

}  // namespace shoal
