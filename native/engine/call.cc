#include "engine/call.h"

namespace shoal {

uint32_t Call::granted(uint32_t at) const {
  const StepState& send = state[at];
  if (send.cts_flow == Place::kNoFlow) return send.granted;
  const auto& theirs = plan->program->recvs_from[plan->program->steps[at].peer];
  return send.cts_flow < theirs.size() ? std::min(send.granted, state[theirs[send.cts_flow]].done)
                                       : 0;
}

Into Call::next_of(uint32_t at) const {
  const Step& step = plan->program->steps[at];
  const uint32_t segment = state[at].done;
  const size_t n_bytes = segment_bytes(step, segment);
  return {segment_at(step.buffer, step.chunk, segment), n_bytes, step.fold ? plan->fold : nullptr,
          n_bytes / size_of(plan->dtype)};
}

void Call::use(uint32_t at, const std::byte* from) const {
  const Into into = next_of(at);
  const Narrow* codec = state[at].codec;
  if (codec == nullptr)
    into.take(from);
  else if (plan->program->steps[at].fold)
    codec->fold(into.at, into.at, from, into.n_elems);
  else
    codec->decode(into.at, from, into.n_elems);
}

Frame Call::frame(FrameType type, uint32_t flow, uint32_t segment) const {
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
Frame Call::post_notice(int peer) const {
  Frame notice = frame(FrameType::kPost, 0, 0);
  if (plan->by_pair) notice.carry(lengths_with(peer));
  return notice;
}

}  // namespace shoal
