#include "engine/segments/slot_way.h"

#include <cstring>
#include <new>

namespace shoal {

static_assert(kSegmentBytes <= Slots::kSlotBytes, "a segment lies in one slot");

// ---- sender

size_t SlotWay::send(Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const int peer = call.peer_of(step);
  // The last free slot is kept for segments that the receiver can use at once. These always get
  // through, so no set of calls can deadlock.
  const bool granted_now = state.started < call.granted(at);
  if (!granted_now && !call.posts.posted_by[step.peer])
    return stalled(traffic_[peer].no_grant);  // its grant will make the step ready
  if (slots_.free_for(peer) >= (granted_now ? 1u : 2u)) return put_in_slot(call, at);
  if (!state.waits_for_slot) waiting_.emplace_back(call.weak_from_this(), at);
  state.waits_for_slot = true;
  return stalled(traffic_[peer].no_slot);
}

size_t SlotWay::put_in_slot(Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const int peer = call.peer_of(step);
  // Granted implicitly by our consuming the peer's own flow: report that first.
  if (state.cts_flow != Place::kNoFlow && state.started < state.granted)
    reference_.send_consumed(call, call.plan->program->recvs_from[step.peer][state.cts_flow]);
  size_t moved = 1;
  uint32_t slot = staged(call, step, state.started);
  if (slot == Slots::kNone) {
    slot = fill_slot(call, step, state.started);
    if (slot == Slots::kNone) return 0;
    moved = call.segment_bytes(step, state.started);
  }
  slots_.lend(slot, peer);
  Frame frame = call.frame(FrameType::kOffer, step.flow, state.started);
  frame.header.count = 1;
  frame.header.flags = kInSlot;
  frame.carry({slot, Place::kNoFlow, slots_.stamp(slot)});
  try {
    links_.send(peer, frame);
  } catch (const std::bad_alloc&) {  // the slot was not offered
    slots_.give_back(slot, peer);
    throw;
  }
  steps_.complete(call, at, state.started++);
  if (state.started < state.n_segments) steps_.make_ready(call, at);
  return moved;
}

// The slot that already holds this value for another peer, or kNone.
uint32_t SlotWay::staged(const Call& call, const Step& step, uint32_t segment) const {
  uint32_t slot = Slots::kNone;
  for (const auto& one : call.staged)
    if (one.version == step.version && one.segment == segment && slots_.is_lent(one.slot) &&
        slots_.stamp(one.slot) == one.stamp)
      slot = one.slot;
  return slot;
}

// kNone: memory ran out, and the group has ended.
uint32_t SlotWay::fill_slot(Call& call, const Step& step, uint32_t segment) {
  std::erase_if(call.staged, [&](const auto& old) {
    return !slots_.is_lent(old.slot) || slots_.stamp(old.slot) != old.stamp;
  });
  uint32_t slot = Slots::kNone;
  // Allocate the entry first, since that may fail. No slot in use has the stamp 0.
  call.staged.push_back({step.version, segment, 0, 0});
  if (Error error = slots_.take(slot)) {
    call.staged.pop_back();
    judge_.abort_group(
        *call.group,
        {Fault::kResource, rank_, judge_.who(rank_) + " could not send: " + error.text}, true);
    return Slots::kNone;
  }
  const size_t n_bytes = call.segment_bytes(step, segment);
  std::memcpy(slots_.data(slot), call.segment_at(step.buffer, step.chunk, segment), n_bytes);
  traffic_[call.peer_of(step)].slot_bytes_out += n_bytes;
  call.staged.back().slot = slot;
  call.staged.back().stamp = slots_.stamp(slot);
  return slot;
}

void SlotWay::on_consumed(int peer, uint32_t slot) {
  if (!slots_.give_back(slot, peer))
    return judge_.protocol_error(peer, "gave back a slot it does not hold");
  std::erase_if(waiting_, [&](const auto& waiting) {
    const auto call = waiting.first.lock();
    if (call == nullptr || call->ended) return true;
    if (call->peer_of(call->plan->program->steps[waiting.second]) != peer) return false;
    call->state[waiting.second].waits_for_slot = false;
    steps_.make_ready(*call, waiting.second);
    return true;
  });
}

// ---- receiver

void SlotWay::on_offer(Call& call, uint32_t at, const Header& header, const Place& place) {
  if (!has_segments(call, at, header)) return;
  if (header.count != 1) return no_such_slot(call, at);
  keep(call, at, {header.segment, 1, this, place.region, place.offset});
}

void SlotWay::no_such_slot(const Call& call, uint32_t at) {
  judge_.protocol_error(call.peer_of(call.plan->program->steps[at]),
                        "offered a segment in a slot that it does not have");
}

size_t SlotWay::take(Call& call, uint32_t at, const Offered& offer) {
  Link* link = links_[call.peer_of(call.plan->program->steps[at])];
  if (link == nullptr) return 0;  // lost a moment ago: the group is about to end
  const Into into = next_of(call, at);
  const uint64_t token = links_.new_token();
  const Moved how = link->get(token, call.id(), {offer.place, offer.offset, true}, into);
  if (begun(call, at, token, how)) return into.n_bytes;
  no_such_slot(call, at);
  return 0;
}

void SlotWay::moved(Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  Frame consumed = call.frame(FrameType::kConsumed, step.flow, state.done + 1);
  consumed.header.flags = kInSlot;
  consumed.header.count = state.offered.front().place;
  state.consumed_sent = state.done + 1;
  steps_.advance(call, at, state.done + 1);
  links_.send(call.peer_of(step), consumed);
}

void SlotWay::give_back(int peer, uint32_t slot) {
  Frame frame;
  frame.header.type = FrameType::kConsumed;
  frame.header.flags = kInSlot;
  frame.header.count = slot;
  if (!links_.answer(peer, frame))
    judge_.protocol_error(peer, "offers unwanted slots and reads nothing");
}

}  // namespace shoal
