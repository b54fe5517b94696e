// How much memory this process may still take before the out-of-memory killer comes.
#pragma once

#include <cstddef>
#include <string>

namespace shoal {

struct MemoryLeft {
  size_t n_bytes = 0;
  std::string where;  // what sets the limit: "this machine" or "the memory limit of <cgroup>"
};

// The least of what the machine has and of what each memory cgroup leaves, from the process's own
// up to the outermost that can be seen. Page cache that the kernel would give back counts as left.
// What cannot be read sets no limit.
//
// Cost: opens about ten files under /proc and /sys. `root`: put before their paths, by tests.
// Source: proc(5); the kernel's Documentation/admin-guide, cgroup-v2.rst and cgroup-v1/memory.rst.
MemoryLeft memory_left(const std::string& root = "");

}  // namespace shoal
