#include "engine/segments/put_way.h"

#include <utility>

#include "base/shared_memory.h"
#include "engine/segments/fence.h"

namespace shoal {

Place PutWay::place_for(Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  Link& link = *links_[call.peer_of(step)];
  Place place;
  if (!link.shares_memory() || step.fold || state.grant_sent > 0 || step.buffer == kScratch ||
      call.lands_whole(step))
    return place;
  const uint64_t n_bytes = call.plan->chunk_bytes(step.buffer, step.chunk);
  const std::byte* into = call.chunk(step.buffer, step.chunk);
  const auto region = Regions::of_process().find(into, n_bytes);
  const auto [lo, hi] = call.extent(step.buffer, step.chunk);
  if (region.id == 0 || !Regions::alone_on_pages(region, into, n_bytes, lo, hi) ||
      !link.share(region.id))
    return place;
  place.region = region.id;
  place.offset = static_cast<uint64_t>(into - region.data);
  state.place_granted = true;
  return place;
}

void PutWay::on_place(Call& call, uint32_t at, const Place& place) {
  StepState& state = call.state[at];
  const Link* link = links_[call.peer_of(call.plan->program->steps[at])];
  if (place.region == 0 || link == nullptr || !link->shares_memory() || state.is_eager) return;
  state.region = place.region;
  state.offset = place.offset;
  state.way = this;
}

size_t PutWay::send(Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  if (state.is_moving) return 0;  // the step is made ready when that completes
  const size_t n_bytes = call.segment_bytes(step, state.started);
  // Do not write before the peer's lengths have arrived: its block may be shorter.
  const bool compared = !call.plan->by_pair || call.posts.posted_by[step.peer];
  if (state.started < call.granted(at) && compared && put(call, at)) return n_bytes;
  // The receiver uses segments in order, so report those in its buffer before later ones take
  // slots.
  send_put_complete(call, at);
  return state.unplaced->send(call, at);
}

bool PutWay::put(Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  const StepState& state = call.state[at];
  const uint64_t skipped = uint64_t{state.started} * call.plan->segment_bytes;
  const uint64_t token = links_.new_token();
  return begun(
      call, at, token,
      links_[call.peer_of(step)]->put(
          token, call.id(), call.segment_at(step.buffer, step.chunk, state.started),
          call.segment_bytes(step, state.started), {state.region, state.offset + skipped}));
}

void PutWay::moved(Call& call, uint32_t at) {
  StepState& state = call.state[at];
  const uint32_t done = ++state.started;
  state.unreported++;
  if (done == state.n_segments || state.unreported >= kSegmentsPerNote) send_put_complete(call, at);
  steps_.complete(call, at, done - 1);
  if (done < state.n_segments) steps_.make_ready(call, at);
}

// Report the segments put into the receiver's buffer since the last report.
void PutWay::send_put_complete(Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  if (state.unreported == 0) return;
  Frame frame = call.frame(FrameType::kPutComplete, step.flow, state.started);
  frame.header.count = std::exchange(state.unreported, 0);
  links_.send(call.peer_of(step), frame);
}

void PutWay::on_put_complete(Call& call, uint32_t at, const Header& header) {
  const Step& step = call.plan->program->steps[at];
  if (header.count == 0 || header.count > header.segment ||
      header.segment > call.state[at].grant_sent)
    return judge_.protocol_error(call.peer_of(step),
                                 "put segments of " + call.doing() + " that were not granted");
  // The peer puts these only after consuming our own segments: that send is done.
  if (step.cts_flow != Place::kNoFlow) {
    const uint32_t before = call.plan->program->sends_to[step.peer][step.cts_flow];
    call.state[before].way->consumed(call, before, header.segment);
  }
  keep(call, at, {header.segment - header.count, header.count, this});
}

size_t PutWay::take(Call& call, uint32_t at, const Offered& offer) {
  steps_.advance(call, at, offer.first + offer.count);
  return size_t{offer.count} * call.plan->segment_bytes;
}

void PutWay::fence(const Call& call) const {
  for (uint32_t at = 0; at < call.state.size(); ++at) {
    const Step& step = call.plan->program->steps[at];
    const StepState& state = call.state[at];
    if (state.place_granted && state.done < state.n_segments)
      take_away(call.chunk(step.buffer, step.chunk),
                call.plan->chunk_bytes(step.buffer, step.chunk), Regions::Against::kWrites);
  }
}

}  // namespace shoal
