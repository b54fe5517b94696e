// What this rank knows of every other one: whether it lives, as its own link with it tells.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace shoal {

enum class PeerState : uint8_t {
  kSelf,    // this rank
  kAlive,   //
  kSilent,  // nothing has come for too long; a third rank is asked whether it hears it
  kCut,     // the way to it is gone; a third rank is asked
  kLeft,    // it said goodbye; what it had sent still counts
  kGone,    // there is no such process any more, and no link ever led to it: it left, or died
  kLost,    // this rank has parted with it for good
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
  // A third rank is asked about it.
  bool is_doubted(int peer) const {
    return is(peer, PeerState::kSilent) || is(peer, PeerState::kCut);
  }

  // False, and nothing changes, where the one state may not follow the other.
  bool become(int peer, PeerState next);
  static bool may_follow(PeerState now, PeerState next);

 private:
  std::vector<PeerState> states_;
};

}  // namespace shoal
