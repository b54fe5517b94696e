// The eager allowances: the bytes that a rank may send a peer before the peer has granted them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/segments/links.h"

namespace shoal {

// A peer keeps small messages that arrive before it has posted their call. So each side counts what
// the other may be keeping: this rank stops at its allowance, and drops a peer that exceeds the
// largest possible one.
//
// Frames: `credit` returns what has been used, half an allowance at a time.
// Threads: under the channel's lock.
class Credits {
 public:
  // A quarter of the ceiling is for early small messages of all peers together.
  Credits(Links& links, size_t n_peers, size_t staging_bytes);

  // Sending.
  bool may_send(int peer, size_t n_bytes) const;
  void sent(int peer, size_t n_bytes);
  void came_back(int peer, uint64_t n_bytes);
  uint32_t out_bytes(int peer) const { return out_[static_cast<size_t>(peer)]; }

  // Receiving. False if the peer exceeds the largest possible allowance.
  bool came(int peer, size_t n_bytes);
  void used(int peer, size_t n_bytes);

  // The allowances of all peers together, to be reserved in the staging.
  size_t reserve_bytes() const { return allowance_ * n_others_; }

 private:
  // The cost of an early message at the receiver: its bytes and a record of the frame.
  static uint32_t cost(size_t n_bytes) { return static_cast<uint32_t>(n_bytes) + 256; }

  Links& links_;
  const size_t n_others_;
  const uint32_t allowance_;              // bytes to one peer
  std::vector<uint32_t> out_, in_, due_;  // by peer
};

}  // namespace shoal
