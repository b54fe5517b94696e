// A schedule in its flat native form: one rank's steps with their dataflow made explicit.
// Built by ProgramBuilder; read-only afterwards, shared by calls.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fold/codec.h"
#include "fold/dtype.h"
#include "fold/fold.h"

namespace shoal {

enum class StepKind : uint8_t { kSend = 0, kRecv = 1, kCopy = 2, kFinish = 3 };

inline constexpr int kBuffers = 4;  // DATA, INPUT, OUTPUT, SCRATCH as in schedule/steps.py
inline constexpr int kScratch = 3;

// The unit of pipelining: so many bytes of elements, in memory. Two segments and what they are
// folded into fit in a core's L2; smaller ones cost more messages. At most a slot of the arena.
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

struct Program {
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

// A program for one size, type and operation. `descriptor` says in words what the call does. The
// hash of what all ranks must agree on travels in every frame, so that those that call different
// things find out.
struct Plan {
  std::shared_ptr<const Program> program;
  ChunkLayout layout[kBuffers];
  DType dtype = DType::kFloat32;
  FoldFn fold = nullptr;           // nullptr when nothing is folded
  uint32_t divisor = 1;            // Finish divides by it
  const Narrow* narrow = nullptr;  // how flows between hosts are encoded; nullptr: they are not
  // What a rank folds is rounded by `narrow` as what it is sent is, its own part too: so the bits
  // do not tell who folded. Every rank has to be on a host of its own.
  bool rounds_own = false;
  uint32_t segment_bytes = 0;  // of a whole segment in memory
  uint64_t scratch_bytes = 0;
  // At most about as many frames go to one peer that has yet to make this call.
  uint32_t frames_ahead = 0;
  std::string descriptor;
  uint32_t descriptor_hash = 0;
  // Only two ranks know how long the block between them is: they compare what each says of it. Such
  // a program has one flow at most from one rank to another.
  bool by_pair = false;
  // Of a call of workers and servers: the ranks of the group from this one on are servers, and have
  // no memory but scratch. 0: there are none.
  uint32_t n_workers = 0;
  bool is_server(int rank) const { return n_workers > 0 && rank >= static_cast<int>(n_workers); }
  // That each worker brings to it, in bytes: a server's layout does not tell. 0: nobody knows.
  uint64_t tensor_bytes = 0;
  // How many channels the call is cut over: segment k of lane c is segment k * n_lanes + c of
  // its chunk. Ranks that share memory have one channel to each other.
  uint32_t n_lanes = 1;
  // Of calls whose data waits to leave for other hosts, those of the highest are first.
  int16_t priority = 0;

  std::string flaw() const;  // why no engine can run it; empty: one can
  void index();              // fills what is derived from the program and the layout

  size_t n_chunks() const {
    size_t n = 0;
    for (const ChunkLayout& one : layout) n += one.n_bytes.size();
    return n;
  }
  uint64_t chunk_bytes(int buffer, uint32_t chunk) const { return layout[buffer].n_bytes[chunk]; }
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
