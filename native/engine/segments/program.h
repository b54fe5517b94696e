// A schedule in its native form: one rank's steps with their dependencies.
// Built by ProgramBuilder; read-only afterwards, shared by calls.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fold/codec.h"
#include "fold/dtype.h"
#include "fold/fold.h"

namespace shoal {

enum class StepKind : uint8_t { kSend = 0, kRecv = 1, kCopy = 2, kFinish = 3 };

inline constexpr int kBuffers = 4;  // DATA, INPUT, OUTPUT, SCRATCH as in schedule/steps.py
inline constexpr int kScratch = 3;

// The unit of pipelining, in bytes of elements in memory. Two segments and their sum fit in a
// core's L2; smaller ones cost more messages. At most a slot of the arena.
inline constexpr uint32_t kSegmentBytes = 128u << 10;

struct Step {
  StepKind kind = StepKind::kSend;
  bool fold = false;
  uint8_t buffer = 0;       // of `chunk`: what is read (send, copy) or written (recv, finish)
  uint8_t into_buffer = 0;  // copy only
  int32_t peer = -1;        // group rank
  uint32_t chunk = 0;
  uint32_t into = 0;        // copy only
  uint32_t flow = 0;        // which of the sends (or receives) with this peer
  uint32_t cts_flow = ~0u;  // recv only: the one send to the same peer that this step waits for
  bool is_first = false;    // recv only: nothing before it has written to the chunk
  uint32_t version = 0;     // send only: equal for sends that read the same value of one chunk
  std::vector<uint32_t> waits_for;  // steps that must finish a segment before this one starts it
  std::vector<uint32_t> unlocks;    // the inverse
};

struct Program : std::enable_shared_from_this<Program> {
  std::vector<Step> steps;
  std::vector<int32_t> peers;  // group ranks met, each once, in order of first use
  // Per group rank: the steps that send to it and receive from it, by flow.
  std::vector<std::vector<uint32_t>> sends_to, recvs_from;
};

// Where the chunks of one buffer lie, relative to the pointers given with a call.
struct ChunkLayout {
  std::vector<uint64_t> offset;   // bytes from the base, by chunk
  std::vector<uint64_t> n_bytes;  // by chunk
};

// A program for one size, dtype and operation. `descriptor` describes the call in words. The hash
// of everything that ranks must agree on travels in every frame, so that mismatched calls are
// noticed.
struct Plan : std::enable_shared_from_this<Plan> {
  std::shared_ptr<const Program> program;
  ChunkLayout layout[kBuffers];
  DType dtype = DType::kFloat32;
  FoldFn fold = nullptr;         // nullptr when nothing is folded
  uint32_t divisor = 1;          // Finish divides by it
  std::optional<Narrow> narrow;  // how flows between hosts are encoded, if they are
  // By chunk of scratch: the index of its first element in the call's buffer. Empty: all 0.
  std::vector<uint64_t> scratch_first;
  // A rank rounds its own part by `narrow` before it folds, as received parts are, so the result
  // does not depend on which rank folds. Requires one rank per host.
  bool rounds_own = false;
  uint32_t segment_bytes = 0;  // of a whole segment in memory
  uint64_t scratch_bytes = 0;
  // About how many frames at most go to one peer that has not made this call yet.
  uint32_t frames_ahead = 0;
  std::string descriptor;
  uint32_t descriptor_hash = 0;
  // Only two ranks know the length of the block between them, and they compare it. Such a program
  // has at most one flow from one rank to another.
  bool by_pair = false;
  // In a call of workers and servers: the number of workers, after which the group's ranks are
  // servers with no memory but scratch. 0: no servers.
  uint32_t n_workers = 0;
  bool is_server(int rank) const { return n_workers > 0 && rank >= static_cast<int>(n_workers); }
  // The bytes that each worker contributes, which a server's layout does not show. 0: unknown.
  uint64_t tensor_bytes = 0;
  // The number of channels that the call is cut over: segment k of lane c is segment k * n_lanes +
  // c of its chunk. Ranks that share memory have one channel to each other.
  uint32_t n_lanes = 1;

  std::string flaw() const;  // why no engine can run it; empty if one can
  void index();              // compute the fields derived from the program and the layout

  size_t n_chunks() const {
    size_t n = 0;
    for (const ChunkLayout& one : layout) n += one.n_bytes.size();
    return n;
  }
  uint64_t chunk_bytes(int buffer, uint32_t chunk) const { return layout[buffer].n_bytes[chunk]; }
  // The index of a chunk's first element in the call's buffer.
  uint64_t first_elem(int buffer, uint32_t chunk) const {
    if (buffer != kScratch) return layout[buffer].offset[chunk] / size_of(dtype);
    return chunk < scratch_first.size() ? scratch_first[chunk] : 0;
  }
  uint32_t n_segments(const Step& step, uint32_t lane = 0) const {
    const uint64_t n_whole =
        (chunk_bytes(step.buffer, step.chunk) + segment_bytes - 1) / segment_bytes;
    return static_cast<uint32_t>((n_whole + n_lanes - 1 - lane) / n_lanes);
  }
};

uint64_t hash_of(const std::string& text);
inline uint32_t descriptor_hash_of(const std::string& text) {
  return static_cast<uint32_t>(hash_of(text) >> 32);
}

}  // namespace shoal
