// What parts of a channel keep of each call. Each struct is written by the part after which it is
// named, and by whoever reports to that part what a step has done (steps.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/segments/staging.h"

namespace shoal {

// Of PostNotices: who knows of this call.
struct PostsOf {
  // What a peer may get of this call before it is heard in it.
  enum Standing : uint8_t { kFree, kCounted, kHeld };
  std::vector<Standing> standing;  // by group rank
  std::vector<bool> heard_from;    // by group rank: it has posted this call
  bool told_all = false;           // every peer was told that this call is posted
};

// Of Turns: the order in which sends to several hosts may leave.
struct TurnsOf {
  std::vector<uint32_t> sends;  // in the order of the schedule; empty: none takes turns
  uint64_t longest = 0;         // bytes of the longest chunk
  size_t least_out = 0;         // that may be out, whatever the bound
  uint64_t upto = 0;            // turns up to this one may leave
  bool is_waiting = false;      // in Turns::waiting_
};

// Of Scratch.
struct ScratchOf {
  std::shared_ptr<std::byte[]> memory;  // from the first step that needs it on
  int64_t wanted_ns = -1;               // since when it waits for it
  std::vector<uint32_t> wanted_by;      // the steps that wait for it
  bool overdraws = false;               // it went beyond the staging ceiling
};

// The segments of a chunk of scratch that a served call holds now.
struct Window {
  std::vector<Block> blocks;    // of segments [first, end())
  uint32_t first = 0;           // those before it are over
  uint32_t n_segments = 0;      // of the chunk
  uint32_t n_receives = 0;      // of these steps
  std::vector<uint32_t> steps;  // that touch it, in their order

  uint32_t end() const { return first + static_cast<uint32_t>(blocks.size()); }
};

// Of Windows: the scratch of a served call.
struct WindowsOf {
  std::vector<Window> of_chunk;
  std::vector<uint32_t> moved;  // chunks of which segments may be over
  size_t n_held = 0;            // segments held now
  bool has_all = false;         // none is left to take
  // More comes to this rank than anybody sends: windows are held to what its link brings.
  bool is_incast = false;
  uint64_t n_inbound = 0;  // then: bytes of windows held that are not here
  uint64_t n_came_in = 0;  // of these, since Windows looked
};

// Of Commits: a call of workers and servers; of any other, empty.
struct CommitsOf {
  std::vector<int> with;               // group ranks: it is over when all of them have committed
  std::vector<bool> owed_by;           // by group rank: it has not yet
  std::vector<uint32_t> results_left;  // by group rank: flows of a server that are not all here
  std::vector<int> held_from;          // servers whose flows are, which have yet to be told
  uint32_t n_left = 0;
};

}  // namespace shoal
