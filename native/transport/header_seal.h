// A keyed MAC which proves that a header comes from the peer, undamaged and in its place.
//
// Each direction of each connection has its own key, derived from the job key, so a frame that is
// reflected, or was recorded on another connection, is refused. The MAC covers the header (with the
// checksum of the payload) and counters that both ends keep: the frame's place on the connection,
// and the full numbers whose lower halves the header has. So without the key no frame can be
// forged, repeated, left out or moved, even when numbers wrap. Source:
// docs/decisions/0015-libcrypto.md.
//
// Threads: one at a time.
#pragma once

#include <cstdint>

#include "base/mac.h"
#include "transport/frame.h"

namespace shoal {

// The number nearest to `near` whose lower half is `low`.
constexpr uint64_t widen(uint32_t low, uint64_t near) {
  const auto away = static_cast<int32_t>(low - static_cast<uint32_t>(near));
  return near + static_cast<uint64_t>(static_cast<int64_t>(away));
}

// The counters that the header lacks, or has only in part.
struct Turn {
  uint64_t place = 0;         // how many frames went before it on its connection
  uint64_t sequence = 0;      // of the link; 0: not kept for sending again
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

  // The seal of one connection. `session` (Handshake::session) distinguishes it from earlier
  // connections of the same path.
  HeaderSeal out(uint32_t path, Bytes session = {}) const { return seal(out_, path, session); }
  HeaderSeal in(uint32_t path, Bytes session = {}) const { return seal(in_, path, session); }

 private:
  static HeaderSeal seal(const Secret& key, uint32_t path, Bytes session);

  Secret out_, in_;
};

}  // namespace shoal
