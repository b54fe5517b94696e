// The memory that this process may still take before the out-of-memory killer acts.
#pragma once

#include <cstddef>
#include <string>

namespace shoal {

struct MemoryLeft {
  size_t n_bytes = 0;
  std::string where;  // what sets the limit: "this machine" or "the memory limit of <cgroup>"
};

// The minimum of the machine's memory and of the rest of each memory cgroup's limit, from the
// process's own up to the outermost visible one. Page cache that the kernel can reclaim counts as
// left. An unreadable file sets no limit.
//
// Cost: opens about ten files under /proc and /sys. `root`: put before their paths, by tests.
// Source: proc(5); the kernel's Documentation/admin-guide, cgroup-v2.rst and cgroup-v1/memory.rst.
MemoryLeft memory_left(const std::string& root = "");

}  // namespace shoal
