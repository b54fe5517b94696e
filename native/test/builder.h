// Handmade programs and plans, unlike any algorithm's, for tests of one property of the engine.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/segments/program_builder.h"

namespace shoal::test {

inline constexpr int kData = 0, kInput = 1, kOutput = 2;  // and kScratch

// ---- programs

// Both ranks of a pair replace their buffer by the other's: the dataflow does not show that the
// peer has taken ours when its own arrives.
inline std::shared_ptr<Program> swap_with(int peer, int size) {
  ProgramBuilder steps(size);
  steps.send(peer, 0);
  steps.recv(peer, 0);
  return steps.done();
}

inline std::shared_ptr<Program> point_to_point(int rank, int size, int source, int target) {
  ProgramBuilder steps(size);
  if (rank == source) steps.send(target, 0);
  if (rank == target) steps.recv(source, 0);
  return steps.done();
}

// ---- plans

// `block`: every chunk begins at a multiple of this many elements.
inline ChunkLayout balanced_layout(uint64_t n_elems, size_t item, uint32_t n_chunks,
                                   uint64_t block = 1) {
  ChunkLayout layout;
  uint64_t at = 0;
  const uint64_t n_blocks = (n_elems + block - 1) / block;
  for (uint32_t chunk = 0; chunk < n_chunks; ++chunk) {
    const uint64_t n_own = n_blocks / n_chunks + (chunk < n_blocks % n_chunks ? 1 : 0);
    const uint64_t length = std::min(n_own * block, n_elems - at);
    layout.offset.push_back(at * item);
    layout.n_bytes.push_back(length * item);
    at += length;
  }
  return layout;
}

inline ChunkLayout equal_layout(uint64_t n_bytes, uint32_t n_chunks) {
  ChunkLayout layout;
  for (uint32_t chunk = 0; chunk < n_chunks; ++chunk) {
    layout.offset.push_back(chunk * n_bytes);
    layout.n_bytes.push_back(n_bytes);
  }
  return layout;
}

// The caller fills the layouts; `seal` does the rest.
inline std::shared_ptr<Plan> seal(Plan plan, DType dtype, FoldOp op, uint32_t divisor,
                                  uint32_t segment_bytes, const std::string& descriptor) {
  plan.dtype = dtype;
  plan.fold = fold_function(dtype, op);
  plan.divisor = divisor;
  plan.segment_bytes = segment_bytes;
  plan.descriptor = descriptor;
  plan.descriptor_hash = descriptor_hash_of(descriptor);
  plan.index();
  return std::make_shared<Plan>(std::move(plan));
}

}  // namespace shoal::test
