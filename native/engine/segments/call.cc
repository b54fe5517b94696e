#include "engine/segments/call.h"

#include "engine/segments/kept_back.h"

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

// A sum for an averager that leaves in blocks is rounded at random, with equal bits on any rank:
// gradients of one sign that are small beside the largest of their block would always round to 0.
void Call::finish(uint32_t at) const {
  const Step& step = plan->program->steps[at];
  const uint32_t segment = state[at].done;
  const size_t item = size_of(plan->dtype);
  const size_t n_elems = segment_bytes(step, segment) / item;
  std::byte* const here = segment_at(step.buffer, step.chunk, segment);
  if (plan->divisor > 1) divide(plan->dtype, here, n_elems, plan->divisor);
  const Narrow* codec = state[at].codec;
  if (codec == nullptr) return;
  const uint64_t first = plan->first_elem(step.buffer, step.chunk) + segment_offset(segment) / item;
  if (codec->keep > 0)
    kept_back->round(*codec, subject, plan->tensor_bytes, first, here, n_elems);
  else if (codec->block == 1 || subject == 0)
    codec->round(*codec, here, n_elems);
  else
    codec->round_stochastic(*codec, here, n_elems, subject, first);
}

void Call::use(uint32_t at, const std::byte* from) const {
  const Into into = next_of(at);
  const Narrow* codec = state[at].codec;
  const Step& step = plan->program->steps[at];
  if (plan->rounds_own && step.fold && step.is_first)
    plan->narrow->round(*plan->narrow, into.at, into.n_elems);
  if (codec == nullptr)
    into.take(from);
  else if (step.fold)
    codec->fold(*codec, into.at, into.at, from, into.n_elems);
  else
    codec->decode(*codec, into.at, from, into.n_elems);
}

Landed Call::landed() const {
  Landed all;
  const auto& steps = plan->program->steps;
  for (uint32_t at = 0; at < steps.size(); ++at) {
    if (!lands_whole(steps[at])) continue;
    const uint64_t n_segments =
        (plan->chunk_bytes(steps[at].buffer, steps[at].chunk) + plan->segment_bytes - 1) /
        plan->segment_bytes;
    auto& bits = all.emplace_back(steps[at].chunk, (n_segments + 7) / 8).second;
    const uint32_t n_here = at < state.size() ? state[at].done : 0;  // 0 if it never started
    for (uint64_t here = 0; here < n_here; ++here) {
      const uint64_t segment = here * plan->n_lanes + lane.index;
      bits[segment / 8] = static_cast<uint8_t>(bits[segment / 8] | 1u << segment % 8);
    }
  }
  return all;
}

Landed landed_of(const Call& call) {
  Landed all = call.landed();
  for (const auto& other : call.other_lanes) {
    const Landed more = other->landed();
    for (size_t at = 0; at < all.size(); ++at)
      for (size_t byte = 0; byte < all[at].second.size(); ++byte)
        all[at].second[byte] |= more[at].second[byte];
  }
  return all;
}

Frame Call::frame(FrameType type, uint32_t flow, uint32_t segment) const {
  Frame frame;
  frame.header.type = type;
  frame.header.group = group_id;
  frame.header.key = key;
  frame.header.descriptor = plan->descriptor_hash;
  frame.header.subject = subject;
  frame.header.flow = flow;
  frame.header.segment = segment;
  return frame;
}

// The notice that this rank has posted the call, with the lengths that only these two ranks know.
Frame Call::post_notice(int peer) const {
  Frame notice = frame(FrameType::kPost, 0, 0);
  if (plan->by_pair) notice.carry(lengths_with(peer));
  return notice;
}

}  // namespace shoal
