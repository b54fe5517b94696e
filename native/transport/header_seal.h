// What shows that a header comes from the peer, undamaged and in its turn: a keyed MAC.
//
// Each way of each connection has a key of its own, derived from the job key, so a frame that is
// sent back, or that was recorded on another connection, does not fit. The MAC covers the header
// (with the checksum of the payload) and what both ends count without being told: which frame of
// the connection it is, and the whole of the numbers of which the header has the lower halves. So
// nothing can be made up, repeated, left out or moved by who does not have the key, also when the
// numbers wrap. Source: docs/decisions/0015-libcrypto.md.
//
// Threads: one at a time.
#pragma once

#include <cstdint>

#include "base/mac.h"
#include "transport/frame.h"

namespace shoal {

// The number whose lower half is `low`, of all those the nearest to `near`.
constexpr uint64_t widen(uint32_t low, uint64_t near) {
  const auto away = static_cast<int32_t>(low - static_cast<uint32_t>(near));
  return near + static_cast<uint64_t>(static_cast<int64_t>(away));
}

// What is not in the header, or only in part.
struct Turn {
  uint64_t place = 0;         // how many frames went before it on its connection
  uint64_t sequence = 0;      // of the link; 0 where nobody keeps it
  uint64_t acknowledged = 0;  // of the link
};

class HeaderSeal {
 public:
  explicit HeaderSeal(Secret key) : mac_(std::move(key)) {}

  uint64_t of(const Header& header, const Turn& turn) const;
  bool fits(const Header& header, const Turn& turn) const {
    return header.version == Header::kVersion && header.seal == of(header, turn);
  }

 private:
  ShortMac mac_;
};

// The keys of all frames between two ranks over one channel in one epoch. Throws what base/mac.h
// throws.
class FrameKeys {
 public:
  FrameKeys(Bytes job_key, uint64_t epoch, int rank, int peer, int channel = 0);

  // Of one connection. `session` tells it from others that were the same path: what its handshake
  // says (Handshake::session).
  HeaderSeal out(uint32_t path, Bytes session = {}) const { return seal(out_, path, session); }
  HeaderSeal in(uint32_t path, Bytes session = {}) const { return seal(in_, path, session); }

 private:
  static HeaderSeal seal(const Secret& key, uint32_t path, Bytes session);

  Secret out_, in_;
};

}  // namespace shoal
