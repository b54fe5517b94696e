// Frames of calls that this rank has not posted yet; they wait in their group.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/life/judge.h"
#include "engine/segments/group.h"
#include "engine/segments/ways.h"

namespace shoal {

// Threads: under the channel's lock.
class EarlyFrames {
 public:
  EarlyFrames(size_t n_peers, Ways& ways, Judge& judge)
      : ways_(ways), judge_(judge), n_kept_(n_peers, 0) {}

  // Keep a frame. False if it is of no use here, or if the peer may not be that far ahead.
  bool keep(Group& group, int peer, const Header& header, std::span<std::byte> payload);
  // Take the frames kept for a call. Each counts against the peer until it is used() or discarded.
  std::vector<Early> take(Group& group, uint64_t key);
  void used(Early& frame);
  void discard(std::vector<Early> frames);

  uint32_t n_kept(int peer) const { return n_kept_[static_cast<size_t>(peer)]; }

 private:
  Ways& ways_;
  Judge& judge_;
  std::vector<uint32_t> n_kept_;  // by peer, in all groups
};

}  // namespace shoal
