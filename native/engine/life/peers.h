// The state of every peer, as this rank's own link with it shows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shoal {

enum class PeerState : uint8_t {
  kSelf,    // this rank
  kAlive,   //
  kSilent,  // no frame for too long; a third rank is being asked
  kCut,     // the link to it broke; a third rank is being asked
  kLeft,    // it sent its goodbye; frames that it sent before still count
  kGone,    // its process has ended, and no link to it was ever made
  kLost,    // given up for good
};
inline constexpr size_t kPeerStates = 7;

const char* name_of(PeerState state);

// Threads: under the channel's lock.
class Peers {
 public:
  Peers(size_t n_ranks, int own) : states_(n_ranks, PeerState::kAlive) {
    states_[static_cast<size_t>(own)] = PeerState::kSelf;
  }

  size_t size() const { return states_.size(); }
  PeerState operator[](int peer) const { return states_[static_cast<size_t>(peer)]; }
  bool is(int peer, PeerState state) const { return (*this)[peer] == state; }
  bool lives(int peer) const { return is(peer, PeerState::kAlive); }
  bool has_left(int peer) const { return is(peer, PeerState::kLeft) || is(peer, PeerState::kGone); }
  // True while a third rank is being asked about the peer.
  bool is_doubted(int peer) const {
    return is(peer, PeerState::kSilent) || is(peer, PeerState::kCut);
  }

  // Change the state; false, without a change, where `next` may not follow.
  bool become(int peer, PeerState next);
  static bool may_follow(PeerState now, PeerState next);

 private:
  std::vector<PeerState> states_;
};

}  // namespace shoal
