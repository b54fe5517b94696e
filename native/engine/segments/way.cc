#include "engine/segments/way.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace shoal {

void PlaceWay::consumed(Call& call, uint32_t at, uint32_t segment) {
  steps_.complete_below(call, at, std::min(segment, call.state[at].started));
}

bool PlaceWay::begun(Call& call, uint32_t at, uint64_t token, Moved how) {
  if (how == Moved::kNowhere) return false;
  call.state[at].is_moving = true;
  if (how == Moved::kLater)
    moves_.keep(token, {call.shared_from_this(), at, this});
  else
    completed(call, at, how);
  return true;
}

// If the peer has given this rank up meanwhile, it uses the memory for something else. Then the
// bytes that were read are worthless, and this rank's part in the call is over.
void PlaceWay::completed(Call& call, uint32_t at, Moved how) {
  if (how == Moved::kStale)
    return judge_.evicted_us(call.peer_of(call.plan->program->steps[at]),
                             "it reused a slot that this rank had yet to read");
  StepState& state = call.state[at];
  state.is_moving = false;
  if (const Block landed = std::move(state.landing)) call.use(at, landed.data());
  moved(call, at);
}

Into PlaceWay::next_of(Call& call, uint32_t at) {
  Into into = call.next_of(at);
  if (!call.lands_whole(call.plan->program->steps[at])) return into;
  Block& landing = call.state[at].landing;
  landing = staging_.take(into.n_bytes);
  into.at = landing.data();
  return into;
}

bool PlaceWay::has_segments(const Call& call, uint32_t at, const Header& header) {
  if (header.count > 0 && header.count <= call.state[at].n_segments - header.segment) return true;
  judge_.protocol_error(call.peer_of(call.plan->program->steps[at]),
                        "offered segments that " + call.doing() + " does not have");
  return false;
}

void PlaceWay::keep(Call& call, uint32_t at, const Offered& offer) {
  StepState& state = call.state[at];
  const auto where = std::find_if(state.offered.begin(), state.offered.end(),
                                  [&](const Offered& other) { return other.first > offer.first; });
  const bool after_all = where == state.offered.end();
  const uint32_t before = where == state.offered.begin()
                              ? state.done
                              : std::prev(where)->first + std::prev(where)->count;
  if (offer.first < before || (!after_all && offer.first + offer.count > where->first))
    return judge_.protocol_error(call.peer_of(call.plan->program->steps[at]),
                                 "offered a segment of " + call.doing() + " twice");
  state.offered.insert(where, offer);
  steps_.make_ready(call, at);
}

}  // namespace shoal
