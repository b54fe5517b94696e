// The state of a call that belongs to one part of a channel. Only the part in a struct's name
// writes it, and code that reports a step's progress to that part (steps.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/segments/staging.h"

namespace shoal {

// For PostNotices: which peers know of the call.
struct PostsOf {
  // What may be sent to a peer before its first frame of this call has arrived.
  enum Standing : uint8_t { kFree, kCounted, kHeld };
  std::vector<Standing> standing;  // by group rank
  std::vector<bool> posted_by;     // by group rank: it has posted this call
  bool notified_all = false;       // every peer has been sent a post notice
};

// For Turns: the order in which sends to several hosts may leave.
struct TurnsOf {
  std::vector<uint32_t> sends;  // in the order of the schedule; empty: none takes turns
  uint64_t longest = 0;         // bytes of the longest chunk
  size_t least_out = 0;         // bytes that may be out even beyond the bound
  uint64_t upto = 0;            // turns up to this one may leave
  bool is_waiting = false;      // in Turns::waiting_
};

// For Scratch.
struct ScratchOf {
  std::shared_ptr<std::byte[]> memory;  // null until a step needs it
  int64_t wanted_ns = -1;               // since when the call waits for it
  std::vector<uint32_t> wanted_by;      // the steps that wait for it
  bool overdraws = false;               // it exceeds the staging ceiling
};

// The segments of one chunk of scratch that a served call holds now.
struct Window {
  std::vector<Block> blocks;    // of segments [first, end())
  uint32_t first = 0;           // segments before it are over
  uint32_t n_segments = 0;      // of the chunk
  uint32_t n_receives = 0;      // receives among `steps`
  std::vector<uint32_t> steps;  // the steps that touch the chunk, in their order

  uint32_t end() const { return first + static_cast<uint32_t>(blocks.size()); }
};

// For Windows: the scratch of a served call.
struct WindowsOf {
  std::vector<Window> of_chunk;
  std::vector<uint32_t> moved;  // chunks whose segments may be over
  size_t n_held = 0;            // segments held now
  bool has_all = false;         // every segment has been taken
  // This rank receives several times what any sender sends, so its windows are bounded by its link.
  bool is_incast = false;
  uint64_t n_inbound = 0;  // if so: bytes of held windows that have not arrived
  uint64_t n_came_in = 0;  // bytes that have arrived since Windows last counted
};

// For Commits: a call of workers and servers; empty for any other call.
struct CommitsOf {
  std::vector<int> with;               // group ranks that must commit before the call is over
  std::vector<bool> owed_by;           // by group rank: its commit has not arrived
  std::vector<uint32_t> results_left;  // by group rank: incomplete flows from a server
  std::vector<int> held_from;          // servers whose flows are complete, to be sent a commit
  uint32_t n_left = 0;
};

}  // namespace shoal
