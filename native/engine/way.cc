#include "engine/way.h"

#include <algorithm>
#include <iterator>

namespace shoal {

void PlaceWay::taken(Collective& call, uint32_t at, uint32_t segment) {
  steps_.complete_below(call, at, std::min(segment, call.state[at].started));
}

bool PlaceWay::has_segments(const Collective& call, uint32_t at, const Header& header) {
  if (header.count > 0 && header.count <= call.state[at].n_segments - header.segment) return true;
  judge_.protocol_error(call.peer_of(call.plan->program->steps[at]),
                        "offered segments that " + call.doing() + " does not have");
  return false;
}

void PlaceWay::keep(Collective& call, uint32_t at, const Offered& offer) {
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
