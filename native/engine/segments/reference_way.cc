#include "engine/segments/reference_way.h"

#include "base/shared_memory.h"
#include "engine/segments/fence.h"

namespace shoal {

size_t ReferenceWay::send(Call& call, uint32_t at) {
  const size_t moved = offer(call, at);
  return moved > 0 ? moved : otherwise_.send(call, at);
}

size_t ReferenceWay::offer(Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const std::byte* from = call.segment_at(step.buffer, step.chunk, state.started);
  const auto region = Regions::of_process().find(from, call.segment_bytes(step, state.started));
  const int peer = call.peer_of(step);
  if (region.id == 0) return 0;
  const uint32_t ready = call.segments_ready(step);
  const uint32_t upto = call.fenceable(region, step, state.started, ready);
  if (upto == state.started || !links_[peer]->share(region.id)) return 0;
  Frame frame = call.frame(FrameType::kOffer, step.flow, state.started);
  frame.header.count = upto - state.started;
  frame.carry({region.id, Place::kNoFlow, static_cast<uint64_t>(from - region.data)});
  links_.send(peer, frame);
  state.by_reference = true;
  state.started = upto;
  if (upto < ready) steps_.make_ready(call, at);
  return 1;  // nothing was copied, but something moved
}

void ReferenceWay::on_offer(Call& call, uint32_t at, const Header& header, const Place& place) {
  if (has_segments(call, at, header))
    keep(call, at, {header.segment, header.count, this, place.region, place.offset});
}

size_t ReferenceWay::take(Call& call, uint32_t at, const Offered& offer) {
  const int peer = call.peer_of(call.plan->program->steps[at]);
  Link* link = links_[peer];
  if (link == nullptr) return 0;  // lost a moment ago: the group is about to end
  const Into into = next_of(call, at);
  const uint64_t skipped = uint64_t{call.state[at].done - offer.first} * call.plan->segment_bytes;
  const uint64_t token = links_.new_token();
  const Moved how = link->get(token, call.id(), {offer.place, offer.offset + skipped}, into);
  if (how == Moved::kGone) return 0;  // the reason is on its way, or the deadline ends the call
  if (begun(call, at, token, how)) return into.n_bytes;
  judge_.abort_group(*call.group,
                     {Fault::kResource, rank_,
                      judge_.who(rank_) + " could not map shared memory of " + judge_.who(peer) +
                          ": it has no descriptor or mapping left; raise the limit of open files "
                          "(ulimit -n) or of mappings (vm.max_map_count)"},
                     true);
  return 0;
}

void ReferenceWay::moved(Call& call, uint32_t at) {
  const StepState& state = call.state[at];
  const Offered& offer = state.offered.front();
  const uint32_t done = state.done + 1;
  const bool note =
      done == offer.first + offer.count || done - state.consumed_sent >= kSegmentsPerNote;
  steps_.advance(call, at, done);
  if (note) send_consumed(call, at);
}

void ReferenceWay::send_consumed(Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  if (state.consumed_sent == state.done) return;
  state.consumed_sent = state.done;
  links_.send(call.peer_of(step), call.frame(FrameType::kConsumed, step.flow, state.done));
}

void ReferenceWay::fence(const Call& call) const {
  for (uint32_t at = 0; at < call.state.size(); ++at) fence_offered(call, at);
}

void ReferenceWay::fence_offered(const Call& call, uint32_t at) const {
  const Step& step = call.plan->program->steps[at];
  const StepState& state = call.state[at];
  if (!state.by_reference || state.done == state.started) return;
  uint32_t first = state.done;
  const auto region = Regions::of_process().whole(call.chunk(step.buffer, step.chunk));
  while (first < state.started && call.fenceable(region, step, first, first + 1) == first) ++first;
  const uint32_t upto = call.fenceable(region, step, first, state.started);
  if (first == upto) return;
  const std::byte* begin = call.segment_at(step.buffer, step.chunk, first);
  const std::byte* last = call.segment_at(step.buffer, step.chunk, upto - 1);
  take_away(begin, static_cast<size_t>(last - begin) + call.segment_bytes(step, upto - 1),
            Regions::Against::kReads);
}

}  // namespace shoal
