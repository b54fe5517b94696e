#include "engine/segments/runner.h"

#include <cstring>
#include <utility>

namespace shoal {

size_t Runner::attempt(Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  if (!call.has_memory(step) && !scratch_.take(call, at)) return 0;
  switch (step.kind) {
    case StepKind::kSend:
      return attempt_send(call, at);
    case StepKind::kRecv:
      return attempt_recv(call, at);
    default:
      return attempt_local(call, at);
  }
}

size_t Runner::attempt_send(Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  const StepState& state = call.state[at];
  if (state.started >= call.segments_ready(step) || call.is_held(step.peer)) return 0;
  if (links_[call.peer_of(step)] == nullptr) return 0;
  if (!ways_.turns.may_send(call, at)) return 0;
  return state.way->send(call, at);
}

size_t Runner::attempt_recv(Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  if (state.done == state.n_segments || state.is_moving) return 0;
  if (state.done >= call.segments_ready(step)) {
    ways_.grants.grant(call, at);
    return 0;
  }
  for (size_t i = 0; i < state.arrived.size(); ++i) {
    if (state.arrived[i].segment != state.done) continue;
    const Arrived came = std::move(state.arrived[i]);
    state.arrived.erase(state.arrived.begin() + static_cast<std::ptrdiff_t>(i));
    const size_t n_bytes = call.wire_bytes(at, state.done);
    came.way->take(call, at, came.in_place ? nullptr : came.block.data());
    return n_bytes;
  }
  while (!state.offered.empty() &&
         state.offered.front().first + state.offered.front().count <= state.done)
    state.offered.erase(state.offered.begin());
  if (!state.offered.empty() && state.offered.front().first <= state.done) {
    const Offered offer = state.offered.front();
    return offer.way->take(call, at, offer);
  }
  ways_.grants.grant(call, at);
  return 0;
}

size_t Runner::attempt_local(Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  if (state.done >= call.segments_ready(step)) return 0;
  const size_t n_bytes = call.segment_bytes(step, state.done);
  const size_t n_elems = n_bytes / size_of(call.plan->dtype);
  std::byte* here = call.segment_at(step.buffer, step.chunk, state.done);
  if (step.kind == StepKind::kFinish) {
    call.finish(at);
  } else {
    std::byte* into = call.segment_at(step.into_buffer, step.into, state.done);
    if (step.fold)
      call.plan->fold(into, into, here, n_elems);
    else if (into != here)
      std::memcpy(into, here, n_bytes);
    // Round this rank's own part. Only schedules that fold each part once are rounded like this.
    if (call.plan->rounds_own && !step.fold)
      call.plan->narrow->round(*call.plan->narrow, into, n_elems);
  }
  steps_.advance(call, at, state.done + 1);
  return n_bytes;
}

}  // namespace shoal
