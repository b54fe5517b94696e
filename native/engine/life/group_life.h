// The state of a group, from its first frame to its end, and why it ended.
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
    kUncreated,  // frames of it have arrived; this rank has not created it
    kInUse,      //
    kDeparted,   // a member closed it: calls that need nothing more from that member go on
    kDisputed,   // calls are mismatched: none succeeds; the error is on its way
    kEnded,      // every call, in flight or later, fails with why()
  };
  static constexpr size_t kStates = 5;

  State state() const { return state_; }
  bool has_ended() const { return state_ == State::kEnded; }
  bool is_disputed() const { return state_ == State::kDisputed; }
  const Error& why() const { return why_; }        // empty until it has ended
  const Error& departed() const { return left_; }  // names the first member that left

  // Each changes the state and returns true, or returns false where the state may not follow. The
  // first reason given is kept.
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
