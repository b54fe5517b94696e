#include "engine/segments/eager_way.h"

#include <utility>

namespace shoal {

size_t EagerWay::send(Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  if (state.started < call.granted(at)) return frames_.send(call, at, 0);
  const int peer = call.peer_of(step);
  const size_t n_bytes = call.wire_bytes(at, state.started);
  if (credits_.may_send(peer, n_bytes)) {
    const size_t moved = frames_.send(call, at, kEager);
    if (moved > 0) credits_.sent(peer, n_bytes);
    return moved;
  }
  traffic_[peer].no_credit++;
  if (std::exchange(state.request_sent, true)) return 0;
  if (call.plan->by_pair)
    links_.send(peer, call.post_notice(step.peer));  // it may not want anything of us
  links_.send(peer, call.frame(FrameType::kRequestToSend, step.flow, 0));
  return 0;
}

void EagerWay::on_request_to_send(Call& call, uint32_t at) {
  call.state[at].is_requested = true;
  grants_.grant(call, at);
}

void EagerWay::take(Call& call, uint32_t at, const std::byte* from) {
  const int peer = call.peer_of(call.plan->program->steps[at]);
  credits_.used(peer, call.wire_bytes(at, call.state[at].done));
  steps_.consume(call, at, from);
}

}  // namespace shoal
