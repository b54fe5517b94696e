// Segments between hosts are encoded as they leave and decoded as they are used.
#include <cstring>

#include "engine/engine.h"

namespace shoal {

// Flows between hosts are encoded where the plan says so. A finished value that leaves encoded is
// rounded here too, so that this rank has the bits that the others decode; they pass it on as it
// is.
void Engine::choose_codecs(Collective& call) {
  const Program& program = *call.plan->program;
  if (call.plan->narrow == nullptr) return;
  for (uint32_t at = 0; at < program.steps.size(); ++at) {
    const Step& step = program.steps[at];
    const bool talks = step.kind == StepKind::kSend || step.kind == StepKind::kRecv;
    if (talks && far_[call.group->members[step.peer]]) call.state[at].codec = call.plan->narrow;
  }
  for (uint32_t at = 0; at < program.steps.size(); ++at) {
    const Step& step = program.steps[at];
    if (step.kind != StepKind::kFinish) continue;
    for (const uint32_t next : step.unlocks)
      if (program.steps[next].kind == StepKind::kSend && call.state[next].codec != nullptr)
        call.state[at].codec = call.plan->narrow;
  }
}

// The next segment of a send as it travels; empty while too much for the peer waits to leave.
Encoded::Payload Engine::encode(Collective& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  const StepState& state = call.state[at];
  const int peer = call.group->members[step.peer];
  Encoded::Payload payload = encoded_.take(peer, call.wire_bytes(at, state.started));
  if (payload.block)
    state.codec->encode(payload.block.data(),
                        call.segment_at(step.buffer, step.chunk, state.started),
                        call.segment_bytes(step, state.started) / size_of(call.plan->dtype));
  else
    encoded_.wait(peer, {call.weak_from_this(), at});
  return payload;
}

// Folds or stores the next segment of a receive.
void Engine::use(Collective& call, uint32_t at, const std::byte* from) {
  const Step& step = call.plan->program->steps[at];
  const uint32_t segment = call.state[at].done;
  const size_t n_bytes = call.segment_bytes(step, segment);
  const size_t n_elems = n_bytes / size_of(call.plan->dtype);
  std::byte* into = call.segment_at(step.buffer, step.chunk, segment);
  if (const Narrow* codec = call.state[at].codec)
    step.fold ? codec->fold(into, into, from, n_elems) : codec->decode(into, from, n_elems);
  else if (step.fold)
    call.plan->fold(into, into, from, n_elems);
  else
    std::memcpy(into, from, n_bytes);
}

}  // namespace shoal
