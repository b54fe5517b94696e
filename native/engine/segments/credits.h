// What ranks may send each other without asking: the eager allowances.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/segments/links.h"

namespace shoal {

// Small messages leave before the peer has granted them, and it keeps those that are early. So each
// side counts what the other may be keeping: this rank stops at its allowance, and breaks with a
// peer that goes beyond the most there can be.
//
// Frames: `credit` gives back what has been used, half an allowance at a time.
// Threads: under the channel's lock.
class Credits {
 public:
  // A quarter of the ceiling is for early small messages of all peers together.
  Credits(Links& links, size_t n_peers, size_t staging_bytes);

  // Out.
  bool may_send(int peer, size_t n_bytes) const;
  void sent(int peer, size_t n_bytes);
  void came_back(int peer, uint64_t n_bytes);
  uint32_t out_bytes(int peer) const { return out_[static_cast<size_t>(peer)]; }

  // In. False if the peer sends more than any allowance.
  bool came(int peer, size_t n_bytes);
  void used(int peer, size_t n_bytes);

  // Of all peers together, to be reserved.
  size_t reserve_bytes() const { return allowance_ * n_others_; }

 private:
  // What an early message costs the receiver: the bytes, and a record of the frame.
  static uint32_t cost(size_t n_bytes) { return static_cast<uint32_t>(n_bytes) + 256; }

  Links& links_;
  const size_t n_others_;
  const uint32_t allowance_;              // bytes to one peer
  std::vector<uint32_t> out_, in_, due_;  // by peer
};

}  // namespace shoal
