// Frames come in: each goes to its call, or is kept until that is posted.
#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/engine.h"
#include "transport/frame_rules.h"

namespace shoal {
namespace {

constexpr uint32_t kMaxEarlyFrames = 1u << 16;  // kept per peer; a call costs a peer a handful

Place place_of(std::span<const std::byte> payload) {
  Place place;
  if (payload.size() == sizeof(Place)) std::memcpy(&place, payload.data(), sizeof(Place));
  return place;
}

}  // namespace

Collective* Engine::find(const Header& header) {
  const auto group = groups_.find(header.group);
  if (group == groups_.end()) return nullptr;
  const auto call = group->second->in_flight.find(header.key);
  return call == group->second->in_flight.end() ? nullptr : call->second.get();
}

std::span<std::byte> Engine::landing(int peer, const Header& header) {
  Landing& landing = landing_of(peer, header);
  landing.in_place = false;
  if (header.type != FrameType::kData) {
    if (header.length > kMaxText) return {};
    landing.control.resize(header.length);
    return landing.control;
  }
  if (Collective* call = find(header); call != nullptr && call->group->rank_of[peer] >= 0) {
    const Program& program = *call->plan->program;
    const auto& flows = program.recvs_from[call->group->rank_of[peer]];
    if (header.descriptor == call->plan->descriptor_hash && header.flow < flows.size()) {
      const uint32_t at = flows[header.flow];
      const Step& step = program.steps[at];
      StepState& state = call->state[at];
      // Whatever its turn: paths bring segments in any order.
      const bool is_new =
          header.segment >= state.done &&
          std::none_of(state.arrived.begin(), state.arrived.end(),
                       [&](const auto& came) { return came.segment == header.segment; });
      const bool ready = is_new && header.segment < state.n_segments &&
                         header.segment < call->segments_ready(step) && has_memory(*call, step);
      if (ready && !step.fold && state.codec == nullptr &&
          call->segment_bytes(step, header.segment) == header.length) {
        landing.in_place = true;
        return {call->segment_at(step.buffer, step.chunk, header.segment), header.length};
      }
    }
  }
  landing.block = staging_.take(header.length);
  return {landing.block.data(), header.length};
}

void Engine::arrived(int peer, const Header& header, std::span<std::byte> payload) {
  heard_ns_[peer] = now_;
  traffic_[peer].n_frames_in++;
  to_flush_[peer] = true;  // what came is to be acknowledged
  if (const Link* link = links_[peer].get(); link != nullptr) {
    const uint8_t over = link->shares_memory() ? kOverRing : kOverTcp;
    const std::string broken = broken_rule(header, payload.size(), over);
    if (!broken.empty()) return protocol_error(peer, broken);
  }
  switch (header.type) {
    case FrameType::kHeartbeat:
    case FrameType::kAck:  // the link has seen to it
      return;
    case FrameType::kCredit: {
      const uint64_t back = place_of(payload).offset;
      eager_out_[peer] -= static_cast<uint32_t>(std::min<uint64_t>(back, eager_out_[peer]));
      return;
    }
    case FrameType::kGoodbye:
      peer_state_[peer] = PeerState::kLeft;
      breaking_.push_back({peer, "", false});
      return;
    case FrameType::kAbort:
      return on_abort(peer, header, payload);
    case FrameType::kLost:
      return on_lost(peer, header, payload);
    case FrameType::kData:
      if ((header.flags & kEager) == 0) break;
      eager_in_[peer] += eager_cost(payload.size());
      if (eager_in_[peer] > kMaxEagerBytes)
        return protocol_error(peer, "sent more than its allowance of data without asking");
      break;
    case FrameType::kTaken:
      if ((header.flags & kInSlot) == 0) break;
      if (!slots_.give_back(header.count, peer))
        return protocol_error(peer, "gave back a slot it does not hold");
      std::erase_if(waiting_for_slots_, [&](const auto& waiting) {
        const auto call = waiting.first.lock();
        if (call == nullptr || call->finished) return true;
        if (call->group->members[call->plan->program->steps[waiting.second].peer] != peer)
          return false;
        call->state[waiting.second].waits_for_slot = false;
        make_ready(*call, waiting.second);
        return true;
      });
      return;
    default:
      break;
  }

  const auto known = groups_.find(header.group);
  if (known == groups_.end()) {
    // Of a group that was closed here; or nobody can disagree with a call that we have not made.
    if (was_dropped(header.group) || header.type == FrameType::kDisagree)
      return discard(peer, header, payload);
    return keep_early(unborn(header.group), peer, header, payload);
  }
  Group& group = *known->second;
  if (group.born && group.rank_of[peer] < 0)
    return protocol_error(peer, "sent a frame of a group it is not in");
  if (const auto call = group.in_flight.find(header.key); call != group.in_flight.end()) {
    const auto keep = call->second;
    return handle(*keep, peer, header, payload);
  }
  if (const auto done = group.finished.find(header.key); done != group.finished.end()) {
    if (header.type == FrameType::kDisagree)
      return on_disagree(group, *done->second, header.key, peer, payload);
    Collective past;
    past.group = &group;
    past.plan = done->second;
    past.key = header.key;
    const bool differs = header.descriptor != past.plan->descriptor_hash;
    if (differs && !group.poison) disagree(past, peer);
    if (!differs && header.type == FrameType::kOpen)
      same_lengths(past, group.rank_of[peer], payload);
    return discard(peer, header, payload);
  }
  keep_early(group, peer, header, payload);
}

void Engine::keep_early(Group& group, int peer, const Header& header,
                        std::span<std::byte> payload) {
  // Nobody can disagree with a call that we have not made: it is one we have forgotten.
  if (group.poison || header.type == FrameType::kDisagree || is_forgotten(group, header.key))
    return discard(peer, header, payload);
  if (header.type == FrameType::kData && (header.flags & kEager) == 0)
    return protocol_error(peer, "sent " + std::to_string(payload.size()) +
                                    " B for a call that this rank has not posted");
  if (n_early_[peer] == kMaxEarlyFrames)
    return protocol_error(
        peer, "is more than " + std::to_string(kMaxEarlyFrames) + " frames ahead of this rank");
  n_early_[peer]++;
  group.early[header.key].push_back(
      {peer, header, {payload.begin(), payload.end()}, ++group.n_early});
  landing_of(peer, header).block = {};
  if (!group.receiving.empty()) match_early(group, group.rank_of[peer], header.key);
}

void Engine::discard_early(std::vector<Early> frames) {
  for (const Early& frame : frames) {
    if (frame.peer == rank_) continue;  // used already
    n_early_[frame.peer]--;
    discard(frame.peer, frame.header, frame.payload);
  }
}

// A frame that nobody wants any more still holds something of its sender's.
void Engine::discard(int peer, const Header& header, std::span<const std::byte> payload) {
  if (header.type == FrameType::kData && (header.flags & kEager) != 0)
    owe_credit(peer, eager_cost(payload.size()));
  if (header.type == FrameType::kOffer && (header.flags & kInSlot) != 0)
    give_back(peer, place_of(payload).region);
}

void Engine::give_back(int peer, uint32_t slot) {
  Frame frame;
  frame.header.type = FrameType::kTaken;
  frame.header.flags = kInSlot;
  frame.header.count = slot;
  send(peer, frame);
}

void Engine::handle(Collective& call, int peer, const Header& header,
                    std::span<std::byte> payload) {
  const int from = call.group->rank_of[peer];
  if (from < 0) return protocol_error(peer, "sent a frame of a group it is not in");
  heard_in(call, from);
  if (header.type == FrameType::kDisagree)
    return on_disagree(*call.group, *call.plan, call.key, peer, payload);
  if (header.descriptor != call.plan->descriptor_hash) {
    disagree(call, peer);
    return discard(peer, header, payload);
  }
  const Program& program = *call.plan->program;
  const bool about_my_send = header.type == FrameType::kGrant || header.type == FrameType::kTaken;
  const auto& flows = (about_my_send ? program.sends_to : program.recvs_from)[from];
  if (header.type == FrameType::kOpen) return on_open(call, from, payload);
  const bool known = header.flow < flows.size();
  const uint32_t n_segments = known ? call.state[flows[header.flow]].n_segments : 0;
  if (known && call.plan->by_pair) {
    // Blocks of different length: the open frame, which is on the way, will say so.
    const uint32_t count = header.type == FrameType::kOffer ? header.count : 0;
    if (uint64_t{header.segment} + count > n_segments) return discard(peer, header, payload);
  }
  if (!known || header.segment > n_segments)
    return protocol_error(peer, "named flow " + std::to_string(header.flow) + ", segment " +
                                    std::to_string(header.segment) + " of " + call.doing() +
                                    ", which it does not have");
  switch (header.type) {
    case FrameType::kGrant:
      return on_grant(call, from, header, place_of(payload));
    case FrameType::kData:
      return on_data(call, peer, header, payload);
    case FrameType::kOffer:
      return on_offer(call, header, place_of(payload), flows[header.flow]);
    case FrameType::kTaken:
      return on_taken(call, header, from);
    case FrameType::kPlaced:
      return on_placed(call, header, flows[header.flow]);
    case FrameType::kWant:
      call.state[flows[header.flow]].wanted = true;
      return grant(call, flows[header.flow]);
    default:
      return;  // its rule says where else it goes
  }
}

void Engine::on_open(Collective& call, int from, std::span<const std::byte> payload) {
  if (same_lengths(call, from, payload)) opened(call, from);
}

// Whether the blocks between this rank and a peer are as long for both; ends the group if not.
bool Engine::same_lengths(Collective& call, int from, std::span<const std::byte> payload) {
  if (!call.plan->by_pair) return true;
  if (payload.size() != sizeof(Lengths)) {
    protocol_error(call.group->members[from], "did not say how long its blocks are");
    return false;
  }
  Lengths theirs;
  std::memcpy(&theirs, payload.data(), sizeof(Lengths));
  const Lengths ours = call.lengths_with(from);
  const int own = call.group->rank;
  if (theirs.sent != ours.taken)
    lengths_differ(call, from, own, theirs.sent, ours.taken);
  else if (theirs.taken != ours.sent)
    lengths_differ(call, own, from, ours.sent, theirs.taken);
  return theirs.sent == ours.taken && theirs.taken == ours.sent;
}

void Engine::opened(Collective& call, int from) {
  if (call.peer_open[from]) return;
  call.peer_open[from] = true;
  for (const uint32_t at : call.plan->program->sends_to[from]) make_ready(call, at);
}

void Engine::on_grant(Collective& call, int from, const Header& header, const Place& place) {
  const uint32_t at = call.plan->program->sends_to[from][header.flow];
  StepState& state = call.state[at];
  if (place.gate != Place::kNoGate && place.gate >= call.plan->program->recvs_from[from].size())
    return protocol_error(call.group->members[from],
                          "waits for a flow of " + call.doing() + " that it does not send");
  state.granted = std::max(state.granted, header.segment);
  if (place.gate != Place::kNoGate) state.gate = place.gate;
  if (place.region != 0) {
    state.region = place.region;
    state.offset = place.offset;
  }
  if (!call.plan->by_pair) opened(call, from);  // else only its word on lengths opens it
  make_ready(call, at);
}

void Engine::on_data(Collective& call, int peer, const Header& header,
                     std::span<std::byte> payload) {
  const uint32_t at = call.plan->program->recvs_from[call.group->rank_of[peer]][header.flow];
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  if (call.plan->by_pair && payload.size() != call.wire_bytes(at, header.segment)) {
    discard(peer, header, payload);
    // A larger block was announced by an open frame, which may be late.
    if ((header.flags & kEager) == 0) return;
    return lengths_differ(call, call.group->rank_of[peer], call.group->rank, payload.size(),
                          call.plan->chunk_bytes(step.buffer, step.chunk));
  }
  Landing& landing = landing_of(peer, header);
  const bool twice = header.segment < state.done ||
                     std::any_of(
                         state.arrived.begin(), state.arrived.end(),
                         [&](const auto& came) { return came.segment == header.segment; });
  const bool allowed = (header.flags & kEager) != 0 || header.segment < state.grant_said;
  if (twice || !allowed || header.segment >= state.n_segments ||
      payload.size() != call.wire_bytes(at, header.segment))
    return protocol_error(peer, "sent segment " + std::to_string(header.segment) + " of " +
                                    call.doing() + " twice, unasked, or with a wrong length of " +
                                    std::to_string(payload.size()) + " B");
  const bool eager = (header.flags & kEager) != 0;
  // The peer sends this only after consuming our own segment: that send is done.
  if (step.gate != Place::kNoGate && !eager)
    taken_by_peer(call, call.plan->program->sends_to[step.peer][step.gate], header.segment + 1);
  const bool has_place = has_memory(call, step);
  const bool landed = landing.in_place && has_place &&
                      payload.data() == call.segment_at(step.buffer, step.chunk, header.segment);
  if (header.segment == state.done && state.done < call.segments_ready(step) && has_place) {
    // Deeper calls reuse the landing; the block must live until the bytes are used. A frame that
    // was kept until now lies elsewhere, and the landing may be in use.
    Block used;
    if (landing.block.data() == payload.data()) used = std::move(landing.block);
    if (eager) owe_credit(peer, eager_cost(payload.size()));
    return consume(call, at, landed ? nullptr : payload.data());
  }
  Arrived came{header.segment, {}, landed, eager};
  if (!landed) {
    if (landing.block && landing.block.data() == payload.data()) {
      came.block = std::move(landing.block);
    } else {
      came.block = staging_.take(payload.size());
      std::memcpy(came.block.data(), payload.data(), payload.size());
    }
  }
  state.arrived.push_back(std::move(came));
}

void Engine::on_offer(Collective& call, const Header& header, const Place& place, uint32_t at) {
  const StepState& state = call.state[at];
  const int peer = call.group->members[call.plan->program->steps[at].peer];
  const bool in_slot = (header.flags & kInSlot) != 0;
  if (header.count == 0 || header.count > state.n_segments - header.segment)
    return protocol_error(peer, "offered segments that " + call.doing() + " does not have");
  if (in_slot && (header.count != 1 || links_[peer]->peer_slot(place.region).data == nullptr))
    return protocol_error(peer, "offered a segment in a slot that it does not have");
  add_offer(call, at,
            {header.segment, header.count, in_slot ? 0 : place.region, place.offset,
             in_slot ? place.region : Slots::kNone, false});
}

// Keeps offers in the order of their segments; one segment comes once.
void Engine::add_offer(Collective& call, uint32_t at, const Offered& offer) {
  StepState& state = call.state[at];
  const auto where = std::find_if(state.offered.begin(), state.offered.end(),
                                  [&](const Offered& other) { return other.first > offer.first; });
  const bool after_all = where == state.offered.end();
  const uint32_t before = where == state.offered.begin()
                              ? state.done
                              : std::prev(where)->first + std::prev(where)->count;
  if (offer.first < before || (!after_all && offer.first + offer.count > where->first))
    return protocol_error(call.group->members[call.plan->program->steps[at].peer],
                          "offered a segment of " + call.doing() + " twice");
  state.offered.insert(where, offer);
  make_ready(call, at);
}

void Engine::on_taken(Collective& call, const Header& header, int from) {
  taken_by_peer(call, call.plan->program->sends_to[from][header.flow], header.segment);
}

// The peer has used the segments of a send below `segment`, it says. What travels in frames is the
// link's to give back, NOT the peer's: it may say so while the link still reads that memory.
void Engine::taken_by_peer(Collective& call, uint32_t at, uint32_t segment) {
  const Step& step = call.plan->program->steps[at];
  const Link* link = links_[call.group->members[step.peer]].get();
  if (link == nullptr || !link->shares_memory() || is_eager(call, at)) return;
  complete_below(call, at, std::min(segment, call.state[at].started));
}

void Engine::on_placed(Collective& call, const Header& header, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  if (header.count == 0 || header.count > header.segment ||
      header.segment > call.state[at].grant_said)
    return protocol_error(call.group->members[step.peer],
                          "put segments of " + call.doing() + " that were not granted");
  if (step.gate != Place::kNoGate)
    taken_by_peer(call, call.plan->program->sends_to[step.peer][step.gate], header.segment);
  add_offer(call, at, {header.segment - header.count, header.count, 0, 0, Slots::kNone, true});
}

void Engine::owe_credit(int peer, uint32_t n_bytes) {
  credit_due_[peer] += n_bytes;
  if (credit_due_[peer] < eager_allowance_ / 2) return;
  Frame frame;
  frame.header.type = FrameType::kCredit;
  frame.carry({0, Place::kNoGate, credit_due_[peer]});
  eager_in_[peer] -= credit_due_[peer];
  credit_due_[peer] = 0;
  send(peer, frame);
}

}  // namespace shoal
