// Running the steps of a call: which segment may move, and by which of the ways a link offers.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/fence.h"
#include "base/shared_memory.h"
#include "engine/engine.h"

namespace shoal {
namespace {

// Segments between two notes to the peer about segments it need not act on at once. Fewer notes
// cost the peer later starts of what follows; more cost a wake-up each.
constexpr uint32_t kSegmentsPerNote = 8;

}  // namespace

// What the receiver allows, counting its promise to be ready once we have consumed its own flow.
uint32_t Engine::granted(const Collective& call, uint32_t at) const {
  const StepState& state = call.state[at];
  if (state.gate == Place::kNoGate) return state.granted;
  const Step& step = call.plan->program->steps[at];
  const auto& theirs = call.plan->program->recvs_from[step.peer];
  if (state.gate >= theirs.size()) return 0;
  return std::min(state.granted, call.state[theirs[state.gate]].done);
}

// Small flows go at once, without asking: the receiver keeps them if it is late.
bool Engine::is_eager(const Collective& call, uint32_t at) const {
  const Step& step = call.plan->program->steps[at];
  const Link* link = links_[call.group->members[step.peer]].get();
  const uint64_t n_bytes = call.plan->chunk_bytes(step.buffer, step.chunk);
  return link != nullptr && call.as_encoded(at, n_bytes) <= link->max_inline();
}

bool Engine::progress(size_t budget) {
  size_t moved = 0;
  // Who was given up must not use what it finds: others may have other data there by now.
  if (!breaking_.empty() && breaking_.front().at_once) settle_broken();
  while (!runnable_.empty() && moved < budget) {
    // The oldest call first: others wait for it too.
    const std::shared_ptr<Collective> call = runnable_.front();
    if (call->ready.empty() || call->finished) {
      call->queued = false;
      runnable_.pop_front();
      continue;
    }
    const uint32_t at = call->ready.back();
    call->ready.pop_back();
    moved += attempt(*call, at);
  }
  flush();
  if (!endings_.empty()) settle_endings();
  settle_broken();
  return moved > 0 || has_work();  // links that were flushed may have made room for more
}

void Engine::make_ready(Collective& call, uint32_t at) {
  call.ready.push_back(at);
  if (call.queued) return;
  call.queued = true;
  runnable_.push_back(call.shared_from_this());
}

// Moves one segment (by reference: all that are ready) of a step if it can. Returns bytes handled.
size_t Engine::attempt(Collective& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  if (!has_memory(call, step) && !take_scratch(call)) {
    wait_for_scratch(call, at);
    return 0;
  }
  switch (step.kind) {
    case StepKind::kSend:
      return attempt_send(call, at);
    case StepKind::kRecv:
      return attempt_recv(call, at);
    default:
      return attempt_local(call, at);
  }
}

// Segments below `done` are through this step: those that waited for it may go on.
void Engine::advance(Collective& call, uint32_t at, uint32_t done) {
  StepState& state = call.state[at];
  if (done <= state.done) return;
  const Step& step = call.plan->program->steps[at];
  moved_upto(call, at, done);
  if (done == state.n_segments) call.steps_left--;
  if (call.steps_left == 0) return finish(call, {});
  if (done < state.n_segments) make_ready(call, at);
  if (step.kind == StepKind::kRecv) {
    for (const uint32_t reply : call.plan->program->sends_to[step.peer])
      if (call.state[reply].gate == step.flow) make_ready(call, reply);
  }
  for (auto next = step.unlocks.rbegin(); next != step.unlocks.rend(); ++next)
    make_ready(call, *next);
}

// ---- sends

size_t Engine::attempt_send(Collective& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const int peer = call.group->members[step.peer];
  Link* link = links_[peer].get();
  const uint32_t ready = call.segments_ready(step);
  if (state.started >= ready || link == nullptr || is_held(call, step.peer)) return 0;

  const uint32_t may = granted(call, at);
  const size_t n_bytes = call.wire_bytes(at, state.started);
  if (is_eager(call, at)) {
    if (state.started < may) return send_data(call, at, false);
    if (eager_out_[peer] + eager_cost(n_bytes) <= eager_allowance_)
      return send_data(call, at, true);
    traffic_[peer].no_credit++;
    if (!state.want_said) {
      if (call.plan->by_pair) send_open(call, step.peer);  // it may not want anything of us
      send(peer, frame_for(call, FrameType::kWant, step.flow, 0));
    }
    state.want_said = true;
    return 0;
  }
  if (!link->shares_memory())
    return state.started < may ? send_data(call, at, false) : stalled(traffic_[peer].no_grant);

  // Where the peer's own word on lengths may be late, it is not written to: its block may be
  // shorter.
  const bool compared = !call.plan->by_pair || call.peer_open[step.peer];
  if (state.region != 0 && state.started < may && compared) {
    const uint64_t offset = state.offset + uint64_t{state.started} * call.plan->segment_bytes;
    if (std::byte* to = link->peer_address(state.region, offset, n_bytes))
      return send_put(call, at, to);
  }
  // The receiver takes segments in order: what lies in its buffer must not be a secret any more
  // when later ones hold slots.
  say_placed(call, at);
  if (size_t moved = send_by_reference(call, at, ready)) return moved;
  // The last free slot is kept for segments the receiver can use at once: whatever else fills the
  // slots, those always get through, so no set of calls can block each other.
  const bool granted_now = state.started < may;
  if (!granted_now && !call.peer_open[step.peer])
    return stalled(traffic_[peer].no_grant);  // its word will wake this step
  if (slots_.free_for(peer) >= (granted_now ? 1u : 2u)) return send_in_slot(call, at);
  if (!state.waits_for_slot) waiting_for_slots_.emplace_back(call.weak_from_this(), at);
  state.waits_for_slot = true;
  return stalled(traffic_[peer].no_slot);
}

// Straight into the receiver's own buffer.
size_t Engine::send_put(Collective& call, uint32_t at, std::byte* to) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const size_t n_bytes = call.segment_bytes(step, state.started);
  std::memcpy(to, call.segment_at(step.buffer, step.chunk, state.started), n_bytes);
  const uint32_t done = ++state.started;
  state.unsaid++;
  if (done == state.n_segments || state.unsaid >= kSegmentsPerNote) say_placed(call, at);
  complete(call, at, done - 1);
  if (!call.finished && done < state.n_segments) make_ready(call, at);
  return n_bytes;
}

// Tells the receiver which segments lie in its buffer since the last time it was told.
void Engine::say_placed(Collective& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  if (state.unsaid == 0) return;
  Frame frame = frame_for(call, FrameType::kPlaced, step.flow, state.started);
  frame.header.count = std::exchange(state.unsaid, 0);
  send(call.group->members[step.peer], frame);
}

size_t Engine::send_data(Collective& call, uint32_t at, bool eager) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const int peer = call.group->members[step.peer];
  const size_t n_bytes = call.wire_bytes(at, state.started);
  Encoded::Payload encoded;
  if (state.codec != nullptr) {
    encoded = encode(call, at);
    if (!encoded.block) return 0;
  }
  Frame frame = frame_for(call, FrameType::kData, step.flow, state.started);
  frame.header.length = static_cast<uint32_t>(n_bytes);
  frame.header.flags = eager ? kEager : 0;
  frame.payload = encoded.block ? encoded.block.data()
                                : call.segment_at(step.buffer, step.chunk, state.started);
  frame.token = next_token_++;
  if (eager) eager_out_[peer] += eager_cost(n_bytes);
  const uint32_t segment = state.started++;
  const bool is_free = send(peer, frame);
  if (encoded.block) {
    is_free ? encoded_.give_back(encoded) : encoded_.keep(frame.token, peer, std::move(encoded));
    complete(call, at, segment);  // nobody looks at the segment itself any more
  } else if (is_free) {
    complete(call, at, segment);
  } else {
    outstanding_[frame.token] = {call.shared_from_this(), at, segment};
  }
  if (!call.finished && state.started < state.n_segments) make_ready(call, at);
  return n_bytes;
}

// The peer reads our shared buffer itself; the segments are done when it says so.
size_t Engine::send_by_reference(Collective& call, uint32_t at, uint32_t ready) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const std::byte* from = call.segment_at(step.buffer, step.chunk, state.started);
  const auto region = Regions::of_process().find(from, call.segment_bytes(step, state.started));
  const int peer = call.group->members[step.peer];
  if (region.id == 0) return 0;
  const uint32_t upto = call.fenceable(region, step, state.started, ready);
  if (upto == state.started || !links_[peer]->share(region.id)) return 0;
  Frame frame = frame_for(call, FrameType::kOffer, step.flow, state.started);
  frame.header.count = upto - state.started;
  frame.carry({region.id, Place::kNoGate, static_cast<uint64_t>(from - region.data)});
  send(peer, frame);
  state.by_reference = true;
  state.started = upto;
  if (upto < ready) make_ready(call, at);
  return 1;  // nothing was copied, but something moved
}

size_t Engine::send_in_slot(Collective& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const int peer = call.group->members[step.peer];
  const size_t n_bytes = call.segment_bytes(step, state.started);
  uint32_t slot = Slots::kNone;
  for (const auto& staged : call.staged)
    if (staged.version == step.version && staged.segment == state.started &&
        slots_.is_lent(staged.slot) && slots_.stamp(staged.slot) == staged.stamp)
      slot = staged.slot;
  size_t moved = 1;
  if (slot == Slots::kNone) {
    if (Error error = slots_.take(slot)) {
      abort_group(*call.group,
                  {Fault::kResource, rank_, who(rank_) + " could not send: " + error.text}, true);
      return 0;
    }
    std::memcpy(slots_.data(slot), call.segment_at(step.buffer, step.chunk, state.started),
                n_bytes);
    moved = n_bytes;
    std::erase_if(call.staged, [&](const auto& old) {
      return !slots_.is_lent(old.slot) || slots_.stamp(old.slot) != old.stamp;
    });
    call.staged.push_back({step.version, state.started, slot, slots_.stamp(slot)});
  }
  slots_.lend(slot, peer);
  // Allowed because we consumed the peer's own flow: it cannot use this before it knows that.
  if (state.gate != Place::kNoGate && state.started < state.granted)
    say_taken(call, call.plan->program->recvs_from[step.peer][state.gate]);
  Frame frame = frame_for(call, FrameType::kOffer, step.flow, state.started);
  frame.header.count = 1;
  frame.header.flags = kInSlot;
  frame.carry({slot, Place::kNoGate, slots_.stamp(slot)});
  send(peer, frame);
  const uint32_t segment = state.started++;
  complete(call, at, segment);
  if (!call.finished && state.started < state.n_segments) make_ready(call, at);
  return moved;
}

void Engine::sent(int, uint64_t token) {
  const auto found = outstanding_.find(token);
  if (found == outstanding_.end()) {
    texts_.erase(token);
    // The last made ready is the first to be tried: what comes first in the schedule.
    for (const auto& [waiting, at] : encoded_.sent(token))
      if (const auto call = waiting.lock(); call && !call->finished) make_ready(*call, at);
    return;
  }
  const Outstanding what = std::move(found->second);
  outstanding_.erase(found);
  if (what.call->finished) return;
  complete(*what.call, what.step, what.segment);
}

// NOT the peer's fault, which is about to complain: somebody here wrote to what was being sent.
void Engine::spoiled(int peer, uint64_t token) {
  const auto found = outstanding_.find(token);
  if (found == outstanding_.end()) return;
  const auto call = found->second.call;
  outstanding_.erase(found);
  if (call->finished) return;
  abort_group(*call->group,
              {Fault::kMismatch, rank_,
               "the program of " + who(rank_) + " wrote to the memory of " + call->doing() +
                   " while it was being sent to " + who(peer) +
                   "; wait for a call before you write to its buffers"},
              true);
}

// A segment's memory is free again. That does not happen in order: a short last segment is copied
// at once, links report as they like, and a segment may go into a slot while the peer still reads
// the one before it by reference. `done` must not pass one that is still borrowed.
void Engine::complete(Collective& call, uint32_t at, uint32_t segment) {
  StepState& state = call.state[at];
  if (segment == state.done && state.ahead.empty()) return advance(call, at, segment + 1);
  state.ahead.push_back(segment);
  complete_below(call, at, state.done);
}

// All segments below `done` are free, and perhaps some after them.
void Engine::complete_below(Collective& call, uint32_t at, uint32_t done) {
  auto& ahead = call.state[at].ahead;
  for (auto next = ahead.begin(); next != ahead.end();) {
    if (*next > done) {
      ++next;
      continue;
    }
    done = std::max(done, *next + 1);
    ahead.erase(next);
    next = ahead.begin();
  }
  advance(call, at, done);
}

// ---- receives

size_t Engine::attempt_recv(Collective& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const int peer = call.group->members[step.peer];
  if (state.done == state.n_segments) return 0;
  if (state.done >= call.segments_ready(step)) {
    grant(call, at);
    return 0;
  }
  const size_t n_bytes = call.wire_bytes(at, state.done);

  for (size_t i = 0; i < state.arrived.size(); ++i) {
    if (state.arrived[i].segment != state.done) continue;
    const Arrived came = std::move(state.arrived[i]);
    state.arrived.erase(state.arrived.begin() + static_cast<std::ptrdiff_t>(i));
    if (came.eager) owe_credit(peer, eager_cost(n_bytes));
    consume(call, at, came.in_place ? nullptr : came.block.data());
    return n_bytes;
  }
  while (!state.offered.empty() &&
         state.offered.front().first + state.offered.front().count <= state.done)
    state.offered.erase(state.offered.begin());
  if (!state.offered.empty() && state.offered.front().first <= state.done) {
    const Offered offer = state.offered.front();
    if (offer.slot != Slots::kNone) return recv_from_slot(call, at, offer);
    if (!offer.in_place) return recv_by_reference(call, at, offer);
    advance(call, at, offer.first + offer.count);
    return size_t{offer.count} * call.plan->segment_bytes;
  }
  grant(call, at);
  return 0;
}

// The segment lies in a slot of the peer's. If it has given this rank up meanwhile, it uses the
// slot for something else: what was read then is nothing, and so is this rank's part in the call.
size_t Engine::recv_from_slot(Collective& call, uint32_t at, const Offered& offer) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const int peer = call.group->members[step.peer];
  const size_t n_bytes = call.segment_bytes(step, state.done);
  Link* link = links_[peer].get();
  if (link == nullptr) return 0;  // lost a moment ago: the group is about to end
  const Link::PeerSlot slot = link->peer_slot(offer.slot);
  const auto is_current = [&](std::memory_order order) {
    return slot.stamp->load(order) == offer.offset;
  };
  bool current = is_current(std::memory_order_acquire);
  if (current) {
    use(call, at, slot.data);
    memory_fence(std::memory_order_acquire);
    current = is_current(std::memory_order_relaxed);
  }
  if (!current) {
    gave_up(peer, "what it was sent has made way for other data");
    return 0;
  }
  Frame taken = frame_for(call, FrameType::kTaken, step.flow, state.done + 1);
  taken.header.flags = kInSlot;
  taken.header.count = offer.slot;
  state.taken_said = state.done + 1;
  advance(call, at, state.done + 1);
  send(peer, taken);
  return n_bytes;
}

size_t Engine::recv_by_reference(Collective& call, uint32_t at, const Offered& offer) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const int peer = call.group->members[step.peer];
  const uint32_t segment = state.done;
  const size_t n_bytes = call.segment_bytes(step, segment);
  Link* link = links_[peer].get();
  if (link == nullptr) return 0;  // lost a moment ago: the group is about to end
  const uint64_t offset = offer.offset + uint64_t{segment - offer.first} * call.plan->segment_bytes;
  const std::byte* from = link->peer_address(offer.region, offset, n_bytes);
  if (from == nullptr) {
    abort_group(*call.group,
                {Fault::kResource, rank_,
                 who(rank_) + " could not map shared memory of " + who(peer) +
                     ": it has no descriptor or mapping left; raise the limit of open files "
                     "(ulimit -n) or of mappings (vm.max_map_count)"},
                true);
    return 0;
  }
  const bool note = segment + 1 == offer.first + offer.count ||
                    segment + 1 - state.taken_said >= kSegmentsPerNote;
  if (note) state.taken_said = segment + 1;
  const Frame taken = frame_for(call, FrameType::kTaken, step.flow, segment + 1);
  consume(call, at, from);
  if (note) send(peer, taken);
  return n_bytes;
}

// What was consumed without a word, because more was to come at once.
void Engine::say_taken(Collective& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  if (state.taken_said == state.done) return;
  state.taken_said = state.done;
  send(call.group->members[step.peer], frame_for(call, FrameType::kTaken, step.flow, state.done));
}

// Uses the next segment of a receive; `from` is nullptr when the bytes lie in place already.
void Engine::consume(Collective& call, uint32_t at, const std::byte* from) {
  if (from != nullptr) use(call, at, from);
  advance(call, at, call.state[at].done + 1);
}

// Tells the sender how far it may go. Over TCP that is ahead of need, backed by reserved staging;
// in shared memory only when this step starves, since slots let the sender run ahead by itself.
void Engine::grant(Collective& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const int peer = call.group->members[step.peer];
  Link* link = links_[peer].get();
  if (link == nullptr || state.grant_said == state.n_segments || is_held(call, step.peer)) return;
  if (is_eager(call, at) && !state.wanted) return;

  Place place;
  uint32_t upto = has_memory(call, step) ? call.segments_ready(step) : 0;
  if (step.gate != Place::kNoGate) {
    place.gate = step.gate;
    upto = state.n_segments;
  }
  if (link->shares_memory() && !step.fold && state.grant_said == 0 && step.buffer != kScratch) {
    const uint64_t n_bytes = call.plan->chunk_bytes(step.buffer, step.chunk);
    std::byte* into = call.chunk(step.buffer, step.chunk);
    const auto region = Regions::of_process().find(into, n_bytes);
    const auto [lo, hi] = call.extent(step.buffer, step.chunk);
    if (region.id != 0 && Regions::alone_on_pages(region, into, n_bytes, lo, hi) &&
        link->share(region.id)) {
      place.region = region.id;
      place.offset = static_cast<uint64_t>(into - region.data);
      state.place_granted = true;
    }
  }
  if (!link->shares_memory() && upto < state.n_segments) {
    look_ahead(call, at, upto);
    upto = std::min(upto + state.reserved, state.n_segments);
  }
  const bool worth_it = upto == state.n_segments || upto - state.grant_said >= state.reserved / 2;
  if (upto <= state.grant_said || !worth_it) return;
  state.grant_said = upto;
  Frame frame = frame_for(call, FrameType::kGrant, step.flow, upto);
  frame.carry(place);
  send(peer, frame);
}

// ---- local steps

size_t Engine::attempt_local(Collective& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  if (state.done >= call.segments_ready(step)) return 0;
  const size_t n_bytes = call.segment_bytes(step, state.done);
  const size_t n_elems = n_bytes / size_of(call.plan->dtype);
  std::byte* here = call.segment_at(step.buffer, step.chunk, state.done);
  if (step.kind == StepKind::kFinish) {
    if (call.plan->divisor > 1) divide(call.plan->dtype, here, n_elems, call.plan->divisor);
    if (state.codec != nullptr) state.codec->round(here, n_elems);
  } else {
    std::byte* into = call.segment_at(step.into_buffer, step.into, state.done);
    if (step.fold)
      call.plan->fold(into, into, here, n_elems);
    else if (into != here)
      std::memcpy(into, here, n_bytes);
  }
  advance(call, at, state.done + 1);
  return n_bytes;
}

}  // namespace shoal
