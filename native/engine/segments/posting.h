// The arguments of a call, passed unchanged from the mesh down to the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/segments/program.h"
#include "engine/segments/subject.h"

namespace shoal {

// By buffer: one base for the layout's offsets, or a pointer for each chunk. Owned by the caller,
// and borrowed by the call until it has finished.
using Memory = std::vector<std::vector<std::byte*>>;

struct Posting {
  std::shared_ptr<const Plan> plan;
  uint64_t key = 0;  // of this call in its group: the same on all ranks, and never used again
  Memory memory = {};
  int64_t deadline_ns = 0;
  bool background = false;  // no caller waits yet: the progress thread starts it
  Subject subject = 0;
};

// A message between two ranks of a group. Messages of one pair and tag are matched in order.
struct Message {
  std::shared_ptr<const Plan> plan;
  bool sends = false;
  int peer = -1;  // group rank; -1 for a receive from any source
  int64_t tag = 0;
  std::byte* data = nullptr;
  int64_t deadline_ns = 0;
  bool background = false;
};

}  // namespace shoal
