#include "engine/life/group_life.h"

#include <array>

namespace shoal {
namespace {

using State = GroupLife::State;

constexpr uint8_t bit(State state) {
  return static_cast<uint8_t>(1u << static_cast<uint8_t>(state));
}

constexpr std::array<uint8_t, GroupLife::kStates> kNext = {
    bit(State::kInUse) | bit(State::kEnded),                             // not created
    bit(State::kDeparted) | bit(State::kDisputed) | bit(State::kEnded),  // in use
    bit(State::kDisputed) | bit(State::kEnded),                          // departed
    bit(State::kEnded),                                                  // disputed
    0,                                                                   // ended
};

constexpr std::array<const char*, GroupLife::kStates> kNames = {"not created", "in use", "departed",
                                                                "disputed", "ended"};

}  // namespace

const char* name_of(State state) { return kNames[static_cast<size_t>(state)]; }

bool GroupLife::may_follow(State now, State next) {
  return (kNext[static_cast<size_t>(now)] & bit(next)) != 0;
}

bool GroupLife::become(State next) {
  if (!may_follow(state_, next)) return false;
  state_ = next;
  return true;
}

bool GroupLife::depart(Error left) {
  if (!become(State::kDeparted)) return false;
  left_ = std::move(left);
  return true;
}

bool GroupLife::end(Error why) {
  if (!become(State::kEnded)) return false;
  why_ = std::move(why);
  return true;
}

}  // namespace shoal
