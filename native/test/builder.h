// Programs and plans made by hand: what no algorithm does, for tests of one property of the engine.
// The dataflow rules are those of src/shoal/engine.py; test_program.cc holds them to its programs.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/program.h"

namespace shoal::test {

inline constexpr int kData = 0, kInput = 1, kOutput = 2;  // and kScratch

// Adds one rank's steps in order and derives what each waits for.
class ProgramBuilder {
 public:
  void send(int peer, uint32_t chunk, int buffer = kData) {
    Step step = make(StepKind::kSend, peer, chunk, buffer);
    const Place here{buffer, chunk};
    const auto writer = writer_.find(here);
    const std::pair<Place, int> value{here, writer == writer_.end() ? -1 : writer->second};
    step.version = values_.emplace(value, static_cast<uint32_t>(values_.size())).first->second;
    step.waits_for = read(here);
    add(std::move(step));
  }
  void recv(int peer, uint32_t chunk, bool fold = false, int buffer = kData) {
    Step step = make(StepKind::kRecv, peer, chunk, buffer);
    step.fold = fold;
    step.waits_for = write({buffer, chunk});
    add(std::move(step));
  }
  void copy(uint32_t chunk, uint32_t into, int buffer, int into_buffer, bool fold = false) {
    Step step = make(StepKind::kCopy, -1, chunk, buffer);
    step.into = into;
    step.into_buffer = static_cast<uint8_t>(into_buffer);
    step.fold = fold;
    step.waits_for = read({buffer, chunk});
    for (const uint32_t before : write({into_buffer, into})) step.waits_for.push_back(before);
    add(std::move(step));
  }
  void finish(uint32_t chunk, int buffer = kData) {
    Step step = make(StepKind::kFinish, -1, chunk, buffer);
    step.waits_for = write({buffer, chunk});
    add(std::move(step));
  }
  std::shared_ptr<Program> done(int group_size) {
    program_->index(group_size);
    return program_;
  }

 private:
  using Place = std::pair<int, uint32_t>;

  static Step make(StepKind kind, int peer, uint32_t chunk, int buffer) {
    Step step;
    step.kind = kind;
    step.peer = peer;
    step.chunk = chunk;
    step.buffer = static_cast<uint8_t>(buffer);
    return step;
  }
  void add(Step step) { program_->steps.push_back(std::move(step)); }
  uint32_t next() const { return static_cast<uint32_t>(program_->steps.size()); }

  std::vector<uint32_t> read(const Place& place) {
    readers_[place].push_back(next());
    const auto writer = writer_.find(place);
    if (writer == writer_.end()) return {};
    return {static_cast<uint32_t>(writer->second)};
  }
  std::vector<uint32_t> write(const Place& place) {
    std::vector<uint32_t> waits = std::move(readers_[place]);
    readers_.erase(place);
    const auto writer = writer_.find(place);
    if (waits.empty() && writer != writer_.end())
      waits.push_back(static_cast<uint32_t>(writer->second));
    writer_[place] = static_cast<int>(next());
    return waits;
  }

  std::shared_ptr<Program> program_ = std::make_shared<Program>();
  std::map<Place, int> writer_;
  std::map<Place, std::vector<uint32_t>> readers_;
  std::map<std::pair<Place, int>, uint32_t> values_;
};

// ---- programs

// Both ranks of a pair replace their buffer by the other's: no dataflow tells that the peer has
// taken ours when its own comes.
inline std::shared_ptr<Program> swap_with(int peer, int size) {
  ProgramBuilder steps;
  steps.send(peer, 0);
  steps.recv(peer, 0);
  return steps.done(size);
}

inline std::shared_ptr<Program> point_to_point(int rank, int size, int source, int target) {
  ProgramBuilder steps;
  if (rank == source) steps.send(target, 0);
  if (rank == target) steps.recv(source, 0);
  return steps.done(size);
}

// ---- plans

inline ChunkLayout balanced_layout(uint64_t n_elems, size_t item, uint32_t n_chunks) {
  ChunkLayout layout;
  uint64_t at = 0;
  for (uint32_t chunk = 0; chunk < n_chunks; ++chunk) {
    const uint64_t length = n_elems / n_chunks + (chunk < n_elems % n_chunks ? 1 : 0);
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

// The layouts are the caller's to fill; `seal` does the rest.
inline std::shared_ptr<Plan> seal(Plan plan, DType dtype, FoldOp op, uint32_t divisor,
                                  uint32_t segment_bytes, const std::string& descriptor) {
  plan.dtype = dtype;
  plan.fold = fold_function(dtype, op);
  plan.divisor = divisor;
  plan.segment_elems = segment_bytes / static_cast<uint32_t>(size_of(dtype));
  plan.descriptor = descriptor;
  plan.descriptor_hash = hash_of(descriptor);
  plan.index();
  return std::make_shared<Plan>(std::move(plan));
}

}  // namespace shoal::test
