#include "engine/collective.h"

#include <cstring>

namespace shoal {

uint32_t Collective::granted(uint32_t at) const {
  const StepState& send = state[at];
  if (send.gate == Place::kNoGate) return send.granted;
  const auto& theirs = plan->program->recvs_from[plan->program->steps[at].peer];
  return send.gate < theirs.size() ? std::min(send.granted, state[theirs[send.gate]].done) : 0;
}

void Collective::use(uint32_t at, const std::byte* from) {
  const Step& step = plan->program->steps[at];
  const uint32_t segment = state[at].done;
  const size_t n_bytes = segment_bytes(step, segment);
  const size_t n_elems = n_bytes / size_of(plan->dtype);
  std::byte* into = segment_at(step.buffer, step.chunk, segment);
  if (const Narrow* codec = state[at].codec)
    step.fold ? codec->fold(into, into, from, n_elems) : codec->decode(into, from, n_elems);
  else if (step.fold)
    plan->fold(into, into, from, n_elems);
  else
    std::memcpy(into, from, n_bytes);
}

Frame Collective::frame(FrameType type, uint32_t flow, uint32_t segment) const {
  Frame frame;
  frame.header.type = type;
  frame.header.group = group_id;
  frame.header.key = key;
  frame.header.descriptor = plan->descriptor_hash;
  frame.header.flow = flow;
  frame.header.segment = segment;
  return frame;
}

// "I have posted this call", and what only these two ranks know of it.
Frame Collective::open_frame(int peer) const {
  Frame open = frame(FrameType::kOpen, 0, 0);
  if (plan->by_pair) open.carry(lengths_with(peer));
  return open;
}

}  // namespace shoal
