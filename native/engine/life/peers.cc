#include "engine/life/peers.h"

#include <array>

namespace shoal {
namespace {

constexpr uint8_t bit(PeerState state) {
  return static_cast<uint8_t>(1u << static_cast<uint8_t>(state));
}

// The states that may follow each one. A lost rank does not come back: it joins again as a new one.
constexpr std::array<uint8_t, kPeerStates> kNext = {
    0,  // self
    bit(PeerState::kSilent) | bit(PeerState::kCut) | bit(PeerState::kLeft) | bit(PeerState::kGone) |
        bit(PeerState::kLost),  // alive
    bit(PeerState::kAlive) | bit(PeerState::kCut) | bit(PeerState::kLeft) |
        bit(PeerState::kLost),  // silent
    bit(PeerState::kLost),      // cut
    0,                          // left
    0,                          // gone
    0,                          // lost
};

constexpr std::array<const char*, kPeerStates> kNames = {"self", "alive", "silent", "cut",
                                                         "left", "gone",  "lost"};

}  // namespace

const char* name_of(PeerState state) { return kNames[static_cast<size_t>(state)]; }

bool Peers::may_follow(PeerState now, PeerState next) {
  return (kNext[static_cast<size_t>(now)] & bit(next)) != 0;
}

bool Peers::become(int peer, PeerState next) {
  PeerState& state = states_[static_cast<size_t>(peer)];
  if (!may_follow(state, next)) return false;
  state = next;
  return true;
}

}  // namespace shoal
