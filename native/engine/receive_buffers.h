// Where the payload goes that each path of each peer is bringing.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "engine/staging.h"
#include "transport/frame.h"

namespace shoal {

struct ReceiveBuffer {
  Block block;                     // of a segment
  std::vector<std::byte> control;  // of any other frame
  std::byte* place = nullptr;      // the segment lands where it belongs, which is there
};

// Threads: under the channel's lock.
class ReceiveBuffers {
 public:
  explicit ReceiveBuffers(size_t n_peers) : by_peer_(n_peers) {}

  ReceiveBuffer& of(int peer, const Header& header) {
    auto& paths = by_peer_[static_cast<size_t>(peer)];  // from its first frame on
    if (paths == nullptr) paths = std::make_unique<Paths>();
    return (*paths)[header.path()];
  }
  // Whether another path may be bringing something to the very same place.
  bool is_shared(int peer, const Header& header, const std::byte* place) const {
    const auto& paths = by_peer_[static_cast<size_t>(peer)];
    for (uint32_t path = 0; paths != nullptr && path < Header::kMaxPaths; ++path)
      if (path != header.path() && (*paths)[path].place == place) return true;
    return false;
  }

 private:
  using Paths = std::array<ReceiveBuffer, Header::kMaxPaths>;
  std::vector<std::unique_ptr<Paths>> by_peer_;
};

}  // namespace shoal
