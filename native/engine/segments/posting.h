// What callers ask of a mesh, and hand down as it is to the engine that does it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/segments/program.h"
#include "engine/segments/subject.h"

namespace shoal {

// By buffer: one base that the layout's offsets count from, or a pointer for each chunk. The
// caller's, and the call's until that has finished.
using Memory = std::vector<std::vector<std::byte*>>;

struct Posting {
  std::shared_ptr<const Plan> plan;
  uint64_t key = 0;  // of this call in its group: the same on all ranks, and never used again
  Memory memory = {};
  int64_t deadline_ns = 0;
  bool background = false;  // nobody waits for it yet: the progress thread begins it
  Subject subject = 0;
};

// A message, from one rank of a group to another. Those of a pair and a tag are matched in order.
struct Message {
  std::shared_ptr<const Plan> plan;
  bool sends = false;
  int peer = -1;  // group rank; a receive's -1: whoever sends first
  int64_t tag = 0;
  std::byte* data = nullptr;
  int64_t deadline_ns = 0;
  bool background = false;
};

}  // namespace shoal
