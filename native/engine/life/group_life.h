// How far a group is between its first frame and its end, and why it ended.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/error.h"

namespace shoal {

// Threads: under the channel's lock.
class GroupLife {
 public:
  enum class State : uint8_t {
    kUncreated,  // others speak of it; this rank has not made it
    kInUse,      //
    kDeparted,   // a member has left in good order: calls that need nothing more of it go on
    kDisputed,   // ranks called different things: nothing succeeds; the words for it are on the way
    kEnded,      // everything in flight and later fails with why()
  };
  static constexpr size_t kStates = 5;

  State state() const { return state_; }
  bool has_ended() const { return state_ == State::kEnded; }
  bool is_disputed() const { return state_ == State::kDisputed; }
  const Error& why() const { return why_; }        // empty until it has ended
  const Error& departed() const { return left_; }  // who left first, if anyone has

  // Each is false, and changes nothing, where that may not follow. What is said first counts.
  bool make() { return become(State::kInUse); }
  bool depart(Error left);
  bool dispute() { return become(State::kDisputed); }
  bool end(Error why);

  static bool may_follow(State now, State next);

 private:
  bool become(State next);

  State state_ = State::kUncreated;
  Error why_, left_;
};

const char* name_of(GroupLife::State state);

}  // namespace shoal
