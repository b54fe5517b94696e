#include "engine/segments/grants.h"

#include <algorithm>

namespace shoal {

void Grants::grant(Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const int peer = call.peer_of(step);
  const Link* link = links_[peer];
  if (link == nullptr || state.grant_sent == state.n_segments || call.is_held(step.peer)) return;
  if (state.is_eager && !state.is_requested) return;

  Place place = put_.place_for(call, at);
  uint32_t upto = call.has_memory(step) ? call.segments_ready(step) : 0;
  if (step.cts_flow != Place::kNoFlow) {
    place.cts_flow = step.cts_flow;
    upto = state.n_segments;
  }
  // A segment that is stored in a window needs no staging.
  const bool is_windowed = call.is_served && step.waits_for.empty();
  const uint32_t most = call.may_come(at);
  if (!link->shares_memory() && upto < most && !is_windowed)
    upto = granted_.look_ahead(call, at, upto);
  const bool worth_it = upto == most || upto - state.grant_sent >= state.reserved / 2;
  if (upto <= state.grant_sent || !worth_it) return;
  state.grant_sent = upto;
  Frame frame = call.frame(FrameType::kGrant, step.flow, upto);
  frame.carry(place);
  links_.send(peer, frame);
}

void Grants::on_grant(Call& call, int from, const Header& header, const Place& place) {
  const uint32_t at = call.plan->program->sends_to[from][header.flow];
  StepState& state = call.state[at];
  if (place.cts_flow != Place::kNoFlow &&
      place.cts_flow >= call.plan->program->recvs_from[from].size())
    return judge_.protocol_error((*call.members)[from],
                                 "waits for a flow of " + call.doing() + " that it does not send");
  state.granted = std::max(state.granted, header.segment);
  if (place.cts_flow != Place::kNoFlow) state.cts_flow = place.cts_flow;
  put_.on_place(call, at, place);
  if (!call.plan->by_pair) steps_.posted(call, from);  // otherwise its lengths must come first
  steps_.make_ready(call, at);
}

}  // namespace shoal
