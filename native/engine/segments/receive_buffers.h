// The buffer of the payload that each path of each peer is receiving.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "engine/segments/staging.h"
#include "transport/frame.h"

namespace shoal {

struct ReceiveBuffer {
  Block block;                     // of a segment
  std::vector<std::byte> control;  // of any other frame
};

// Threads: under the channel's lock.
class ReceiveBuffers {
 public:
  explicit ReceiveBuffers(size_t n_peers) : by_peer_(n_peers) {}

  ReceiveBuffer& of(int peer, const Header& header) {
    auto& paths = by_peer_[static_cast<size_t>(peer)];  // null until its first frame
    if (paths == nullptr) paths = std::make_unique<Paths>();
    return (*paths)[header.path()];
  }

 private:
  using Paths = std::array<ReceiveBuffer, Header::kMaxPaths>;
  std::vector<std::unique_ptr<Paths>> by_peer_;
};

}  // namespace shoal
