#include "engine/life/doubts.h"

#include <algorithm>
#include <utility>

namespace shoal {

void Doubts::begin(int peer, const std::string& why, int64_t until) {
  doubts_.push_back({peer, -1, why, until});
  // The ranks that asked about it have lost it too.
  if (is_asked_about(peer)) condemn(peer);
}

bool Doubts::is_asked_about(int peer) const {
  return std::any_of(questions_.begin(), questions_.end(),
                     [&](const Question& one) { return one.about == peer; });
}

void Doubts::left(int peer) {
  answer_all(peer, Answer::kHasLeft);
  forget(peer);
}

void Doubts::wait_until(int64_t until) {
  for (Doubt& doubt : doubts_) doubt.until = std::max(doubt.until, until);
}

void Doubts::forget(int peer) {
  answer_all(peer, Answer::kUnreachable);
  std::erase_if(doubts_, [&](const Doubt& one) { return one.peer == peer; });
  std::erase_if(questions_, [&](const Question& one) { return one.asker == peer; });
}

void Doubts::on_ask(int asker, int about) {
  switch (peers_[about]) {
    case PeerState::kSelf:
      return callbacks_.answer(asker, about, Answer::kAlive);
    case PeerState::kLeft:
      return callbacks_.answer(asker, about, Answer::kHasLeft);
    case PeerState::kGone:
    case PeerState::kLost:
      return callbacks_.answer(asker, about, Answer::kUnreachable);
    case PeerState::kSilent:
    case PeerState::kCut:
      callbacks_.answer(asker, about, Answer::kUnreachable);
      return condemn(about);
    case PeerState::kAlive:
      break;
  }
  bool is_asked = false;
  for (const Question& one : questions_) {
    if (one.about == about && one.asker == asker) return;
    is_asked |= one.about == about;
  }
  questions_.push_back({asker, about, callbacks_.first_answer_by(about).value_or(INT64_MAX)});
  if (!is_asked) callbacks_.ask(about, about);
}

void Doubts::on_answer(int from, int about, Answer what) {
  if (from == about) return answer_all(about, Answer::kAlive);
  const auto doubt = std::find_if(doubts_.begin(), doubts_.end(), [&](const Doubt& one) {
    return one.peer == about && one.asked == from;
  });
  if (doubt == doubts_.end()) return;  // answered by others meanwhile
  if (what == Answer::kUnreachable) return condemn(about);
  if (what == Answer::kHasLeft)
    return callbacks_.conclude({Verdict::kEvicted, about, rank_, doubt->why});
  const auto [low, high] = std::minmax(rank_, about);
  callbacks_.conclude({Verdict::kCut, high, low,
                       "is out: the network between " + callbacks_.who(low) + " and " +
                           callbacks_.who(high) + " is cut; both live, and " +
                           callbacks_.who(from) +
                           " reaches both (or one of the two has no file descriptor left)"});
}

void Doubts::answer_all(int about, Answer what) {
  std::erase_if(questions_, [&](const Question& one) {
    if (one.about == about) callbacks_.answer(one.asker, about, what);
    return one.about == about;
  });
}

// No rank can reach it: neither this one nor the asked or the asking one.
void Doubts::condemn(int peer) {
  answer_all(peer, Answer::kUnreachable);
  const auto doubt = std::find_if(doubts_.begin(), doubts_.end(),
                                  [&](const Doubt& one) { return one.peer == peer; });
  if (doubt != doubts_.end()) callbacks_.conclude({Verdict::kDead, peer, rank_, doubt->why});
}

// The rank to ask about a peer, or -1. Two ranks that have lost each other ask the same third rank;
// ranks that have lost the same peer each ask a different one. Ranks of this rank's host come last,
// since they may be cut off with it.
int Doubts::third(int peer) const {
  const auto size = static_cast<int>(peers_.size());
  int found = -1;
  for (int step = 0; step < size; ++step) {
    const int one = static_cast<int>((int64_t{rank_} + peer + step) % size);
    if (!peers_.lives(one)) continue;
    if (callbacks_.is_far(one) == callbacks_.is_far(peer)) return one;
    if (found < 0) found = one;
  }
  return found;
}

void Doubts::settle(int64_t now) {
  for (size_t at = 0; at < questions_.size();) {
    const int about = questions_[at].about;
    now < questions_[at].until ? ++at : (answer_all(about, Answer::kUnreachable), at = 0);
  }
  for (size_t at = 0; at < doubts_.size();) {
    Doubt& doubt = doubts_[at];
    const int peer = doubt.peer;
    if (doubt.asked >= 0 && peers_.lives(doubt.asked) && now < doubt.until) {
      ++at;
      continue;
    }
    doubt.asked = now < doubt.until ? third(peer) : -1;
    if (doubt.asked >= 0) {
      callbacks_.ask(doubt.asked, peer);
      ++at;
    } else {
      condemn(peer);  // and forgotten
    }
  }
}

}  // namespace shoal
