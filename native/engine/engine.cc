#include "engine/engine.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/shared_memory.h"

namespace shoal {
namespace {

// Bounds on what peers can make this rank remember.
constexpr uint32_t kMaxEarlyFrames = 1u << 16;  // per peer; a call costs a peer a handful
constexpr uint32_t kMaxEagerBytes = 1u << 20;   // per peer, whatever its own ceiling allows it
constexpr size_t kFinishedKept = 4096;          // calls whose late frames are still compared
constexpr uint32_t kMaxText = 4096;

Place place_of(std::span<const std::byte> payload) {
  Place place;
  if (payload.size() == sizeof(Place)) std::memcpy(&place, payload.data(), sizeof(Place));
  return place;
}

}  // namespace

Engine::Engine(int rank, std::vector<std::string> names, const Options& options)
    : rank_(rank),
      names_(std::move(names)),
      options_(options),
      staging_(options.staging_bytes),
      links_(names_.size()),
      peer_state_(names_.size(), PeerState::kAlive),
      heard_ns_(names_.size(), 0),
      said_ns_(names_.size(), 0),
      to_flush_(names_.size(), false),
      eager_out_(names_.size(), 0),
      eager_in_(names_.size(), 0),
      credit_due_(names_.size(), 0),
      n_early_(names_.size(), 0),
      landings_(names_.size()) {
  peer_state_[rank_] = PeerState::kSelf;
  // A quarter of the ceiling for early small messages of all peers together, reserved now.
  const size_t n_peers = std::max<size_t>(1, names_.size() - 1);
  eager_allowance_ =
      static_cast<uint32_t>(std::min<size_t>(kMaxEagerBytes, options.staging_bytes / 4 / n_peers));
  staging_.reserve(eager_allowance_ * n_peers);
}

// Calls hold staging blocks, which must go before it; the calls themselves may stay with callers.
Engine::~Engine() {
  for (const auto& [id, group] : groups_)
    for (const auto& [key, call] : group->in_flight) call->state.clear();
  outstanding_.clear();
  runnable_.clear();
  groups_.clear();
}

void Engine::set_link(int peer, std::unique_ptr<Link> link, int64_t now) {
  links_[peer] = std::move(link);
  heard_ns_[peer] = said_ns_[peer] = now;
  last_tick_ns_ = now_ = now;
}

Group& Engine::add_group(uint64_t id, std::vector<int> members) {
  auto& slot = groups_[id];
  if (slot == nullptr) slot = std::make_unique<Group>();
  Group& group = *slot;
  group.id = id;
  group.members = std::move(members);
  group.rank_of.assign(names_.size(), -1);
  for (size_t at = 0; at < group.members.size(); ++at)
    group.rank_of[group.members[at]] = static_cast<int>(at);
  group.rank = group.rank_of[rank_];
  group.born = true;
  if (group.poison && group.rank_of[group.poisoned_by] < 0) group.poison = {};
  dropped_groups_.erase(id);
  for (const int member : group.members) {
    if (peer_state_[member] == PeerState::kLost || peer_state_[member] == PeerState::kLeft) {
      abort_group(group, {Fault::kPeerLost, member, "was gone already when the group was made"},
                  false);
      break;
    }
  }
  return group;
}

void Engine::drop_group(Group& group) {
  abort_group(group, {Fault::kClosed, -1, "the group was closed with this call in flight"}, false);
  dropped_groups_.insert(group.id);
  groups_.erase(group.id);
}

// ---- posting

std::shared_ptr<Collective> Engine::post(Group& group, std::shared_ptr<const Plan> plan,
                                         uint64_t key,
                                         const std::vector<std::vector<std::byte*>>& memory,
                                         int64_t deadline_ns) {
  auto call = std::make_shared<Collective>();
  call->group = &group;
  call->plan = std::move(plan);
  call->key = key;
  call->serial = ++group.n_calls;
  call->deadline_ns = deadline_ns;
  call->posted_ns = now_;
  Error ended = group.poison;
  for (const Ending& ending : endings_)  // told already, though not settled for earlier calls
    if (!ended && ending.group == group.id) ended = ending.why;
  if (ended || group.in_flight.count(key) != 0) {
    call->error =
        ended ? ended : Error{Fault::kMismatch, -1, "a call with this name is in flight already"};
    call->error.doing = call->doing();
    call->finished = true;
    return call;
  }
  const Program& program = *call->plan->program;
  for (size_t buffer = 0; buffer < memory.size(); ++buffer) call->memory[buffer] = memory[buffer];
  if (call->plan->scratch_bytes > 0) {
    call->scratch.reset(new std::byte[call->plan->scratch_bytes]);
    call->memory[kScratch] = {call->scratch.get()};
  }
  call->peer_open.assign(group.members.size(), false);
  call->state.resize(program.steps.size());
  for (size_t at = 0; at < program.steps.size(); ++at) {
    call->state[at].n_segments = call->plan->n_segments(program.steps[at]);
    if (call->state[at].n_segments > 0) call->steps_left++;
  }
  group.in_flight[key] = call;
  ++n_in_flight_;

  std::vector<bool> greeted(group.members.size(), false);
  for (uint32_t at = static_cast<uint32_t>(program.steps.size()); at-- > 0;) {
    const Step& step = program.steps[at];
    if (call->state[at].n_segments == 0) continue;
    if (step.waits_for.empty()) make_ready(*call, at);
    if (step.kind == StepKind::kRecv && step.gate != Place::kNoGate) grant(*call, at);
    // A small message is its own announcement.
    const bool small = step.peer >= 0 && is_eager(*call, at);
    if (small) greeted[step.peer] = true;
  }
  for (const int peer : program.peers)
    if (!greeted[peer]) send(group.members[peer], frame_for(*call, FrameType::kOpen, 0, 0));

  if (const auto early = group.early.find(key); early != group.early.end()) {
    std::vector<Early> frames = std::move(early->second);
    group.early.erase(early);
    for (Early& frame : frames) {
      if (call->finished) break;
      handle(*call, frame.peer, frame.header, frame.payload);
      n_early_[std::exchange(frame.peer, rank_)]--;
    }
    discard_early(std::move(frames));
  }
  if (group.departed && !call->finished) {
    for (const int peer : program.peers)
      if (peer_state_[group.members[peer]] == PeerState::kLeft && needs(*call, group.members[peer]))
        abort_group(group, group.departed, true);
  }
  if (call->steps_left == 0 && !call->finished) finish(*call, {});
  return call;
}

void Engine::finish(Collective& call, const Error& error) {
  if (call.finished) return;
  Group& group = *call.group;
  if (!error && group.disputed) return;  // nothing succeeds once we know that the ranks differ
  const auto keep = call.shared_from_this();
  call.error = error;
  call.ready.clear();
  for (uint32_t at = 0; at < call.state.size(); ++at) {
    StepState& state = call.state[at];
    if (state.reserved > 0) staging_.unreserve(size_t{state.reserved} * call.plan->segment_bytes);
    if (!error || (state.arrived.empty() && state.offered.empty())) continue;
    // What came and was not used goes back: the links live on.
    const Step& step = call.plan->program->steps[at];
    for (const Arrived& came : std::exchange(state.arrived, {}))
      if (came.eager)
        owe_credit(group.members[step.peer], eager_cost(call.segment_bytes(step, came.segment)));
    for (const Offered& offer : std::exchange(state.offered, {}))
      if (offer.slot != Slots::kNone && offer.first + offer.count > state.done)
        give_back(group.members[step.peer], offer.slot);
  }
  group.in_flight.erase(call.key);
  --n_in_flight_;
  group.finished[call.key] = call.plan;
  group.finished_order.push_back(call.key);
  if (group.finished_order.size() >= 2 * kFinishedKept) {
    for (size_t i = 0; i < kFinishedKept; ++i) group.finished.erase(group.finished_order[i]);
    group.finished_order.erase(group.finished_order.begin(),
                               group.finished_order.begin() + kFinishedKept);
  }
  if (error) {
    // The caller may free its memory now: no link may touch it any more.
    for (int buffer = 0; buffer < kBuffers; ++buffer) {
      if (call.memory[buffer].empty()) continue;
      const auto& layout = call.plan->layout[buffer];
      for (uint32_t chunk = 0; chunk < layout.n_bytes.size(); ++chunk)
        for (const int peer : call.plan->program->peers)
          if (Link* link = links_[group.members[peer]].get())
            link->disown(call.chunk(buffer, chunk), layout.n_bytes[chunk]);
    }
    std::erase_if(outstanding_, [&](const auto& entry) { return entry.second.call == keep; });
    for (uint32_t at = 0; at < call.state.size(); ++at) fence(call, at);
  }
  call.finished.store(true, std::memory_order_release);
  if (on_finished) on_finished(call);
}

// A peer that has yet to hear of the end must neither write to the call's memory any more, nor read
// what the owner does with it now and take that for a result.
void Engine::fence(const Collective& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  const StepState& state = call.state[at];
  if (state.place_granted && state.done < state.n_segments)
    Regions::of_process().fence(call.chunk(step.buffer, step.chunk),
                                call.plan->chunk_bytes(step.buffer, step.chunk));
  if (!state.by_reference || state.done == state.started) return;
  uint32_t first = state.done;
  const auto region = Regions::of_process().find(call.chunk(step.buffer, step.chunk), 1);
  while (first < state.started && call.fenceable(region, step, first, first + 1) == first) ++first;
  const uint32_t upto = call.fenceable(region, step, first, state.started);
  if (first == upto) return;
  const std::byte* begin = call.segment_at(step.buffer, step.chunk, first);
  const std::byte* last = call.segment_at(step.buffer, step.chunk, upto - 1);
  Regions::of_process().fence(
      begin, static_cast<size_t>(last - begin) + call.segment_bytes(step, upto - 1));
}

uint32_t Engine::frames_awaited(const Collective& call) const {
  if (n_in_flight_ != 1 || call.finished) return 1;
  uint32_t awaited = 0;
  const Program& program = *call.plan->program;
  for (uint32_t at = 0; at < program.steps.size(); ++at) {
    const Step& step = program.steps[at];
    const StepState& state = call.state[at];
    if (state.done == state.n_segments || step.kind == StepKind::kCopy) continue;
    if (step.peer < 0) continue;
    // What is still to be sent may hang on the very next frame, and only frames in shared memory
    // ring the bell.
    const Link* link = links_[call.group->members[step.peer]].get();
    const bool to_send = step.kind == StepKind::kSend && state.started < state.n_segments;
    if (to_send || link == nullptr || !link->shares_memory() || !is_eager(call, at)) return 1;
    if (step.kind == StepKind::kRecv && state.arrived.empty()) ++awaited;
  }
  return std::max(1u, awaited);
}

// ---- frames out

Frame Engine::frame_for(const Collective& call, FrameType type, uint32_t flow,
                        uint32_t segment) const {
  Frame frame;
  frame.header.type = type;
  frame.header.group = call.group->id;
  frame.header.key = call.key;
  frame.header.descriptor = call.plan->descriptor_hash;
  frame.header.flow = flow;
  frame.header.segment = segment;
  return frame;
}

bool Engine::send(int peer, const Frame& frame) {
  Link* link = links_[peer].get();
  if (link == nullptr) return true;
  to_flush_[peer] = true;
  said_ns_[peer] = now_;
  return link->send(frame);
}

void Engine::send_text(int peer, Header header, const std::string& text) {
  // Texts outlive this call: they are kept until the link has sent them.
  auto kept = std::make_shared<std::string>(text.substr(0, kMaxText));
  header.length = static_cast<uint32_t>(kept->size());
  Frame frame;
  frame.header = header;
  frame.payload = reinterpret_cast<const std::byte*>(kept->data());
  frame.token = next_token_++;
  if (!send(peer, frame)) texts_[frame.token] = {peer, std::move(kept)};
}

void Engine::flush() {
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (!to_flush_[peer]) continue;
    to_flush_[peer] = false;
    if (links_[peer] != nullptr) links_[peer]->flush(*this);
  }
}

// ---- frames in

Collective* Engine::find(const Header& header) {
  const auto group = groups_.find(header.group);
  if (group == groups_.end()) return nullptr;
  const auto call = group->second->in_flight.find(header.key);
  return call == group->second->in_flight.end() ? nullptr : call->second.get();
}

std::span<std::byte> Engine::landing(int peer, const Header& header) {
  Landing& landing = landings_[peer];
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
      const bool next = header.segment == state.done && header.segment < state.n_segments &&
                        header.segment < call->segments_ready(step);
      if (next && !step.fold && call->segment_bytes(step, header.segment) == header.length) {
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
  switch (header.type) {
    case FrameType::kHeartbeat:
      return;
    case FrameType::kCredit: {
      const uint64_t back = place_of(payload).offset;
      eager_out_[peer] -= static_cast<uint32_t>(std::min<uint64_t>(back, eager_out_[peer]));
      return;
    }
    case FrameType::kGoodbye:
      peer_state_[peer] = PeerState::kLeft;
      breaking_.emplace_back(peer, "");
      return;
    case FrameType::kAbort:
    case FrameType::kLost:
      return on_end_of_group(peer, header, payload);
    case FrameType::kRegion:
    case FrameType::kRelease:
      return;  // links keep these to themselves
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

  auto& slot = groups_[header.group];
  if (slot == nullptr) {
    if (dropped_groups_.count(header.group) != 0) {
      groups_.erase(header.group);
      return discard(peer, header, payload);
    }
    slot = std::make_unique<Group>();
    slot->id = header.group;
  }
  Group& group = *slot;
  if (group.born && group.rank_of[peer] < 0)
    return protocol_error(peer, "sent a frame of a group it is not in");
  if (const auto call = group.in_flight.find(header.key); call != group.in_flight.end()) {
    const auto keep = call->second;
    return handle(*keep, peer, header, payload);
  }
  if (const auto done = group.finished.find(header.key); done != group.finished.end()) {
    if (header.type == FrameType::kDisagree)
      return on_disagree(group, *done->second, header.key, peer, payload);
    if (header.descriptor != done->second->descriptor_hash && !group.poison) {
      Collective past;
      past.group = &group;
      past.plan = done->second;
      past.key = header.key;
      disagree(past, peer);
    }
    return discard(peer, header, payload);
  }
  keep_early(group, peer, header, payload);
}

void Engine::keep_early(Group& group, int peer, const Header& header,
                        std::span<std::byte> payload) {
  // Nobody can disagree with a call that we have not made: it is one we have forgotten.
  if (group.poison || header.type == FrameType::kDisagree) return discard(peer, header, payload);
  const bool data = header.type == FrameType::kData;
  if (data ? (header.flags & kEager) == 0 : payload.size() > sizeof(Place))
    return protocol_error(peer, "sent " + std::to_string(payload.size()) +
                                    " B for a call that this rank has not posted");
  if (n_early_[peer] == kMaxEarlyFrames)
    return protocol_error(
        peer, "is more than " + std::to_string(kMaxEarlyFrames) + " frames ahead of this rank");
  n_early_[peer]++;
  group.early[header.key].push_back({peer, header, {payload.begin(), payload.end()}});
  landings_[peer].block = {};
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
  if (header.type == FrameType::kDisagree)
    return on_disagree(*call.group, *call.plan, call.key, peer, payload);
  if (header.descriptor != call.plan->descriptor_hash) {
    disagree(call, peer);
    return discard(peer, header, payload);
  }
  const Program& program = *call.plan->program;
  const bool about_my_send = header.type == FrameType::kGrant || header.type == FrameType::kTaken;
  const auto& flows = (about_my_send ? program.sends_to : program.recvs_from)[from];
  if (header.type != FrameType::kOpen &&
      (header.flow >= flows.size() || header.segment > call.state[flows[header.flow]].n_segments))
    return protocol_error(peer, "named flow " + std::to_string(header.flow) + ", segment " +
                                    std::to_string(header.segment) + " of " + call.doing() +
                                    ", which it does not have");
  switch (header.type) {
    case FrameType::kOpen:
      return on_open(call, from);
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
      return protocol_error(
          peer, "sent a frame of unknown type " + std::to_string(static_cast<int>(header.type)));
  }
}

void Engine::on_open(Collective& call, int from) {
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
  on_open(call, from);
  make_ready(call, at);
}

void Engine::on_data(Collective& call, int peer, const Header& header,
                     std::span<std::byte> payload) {
  const uint32_t at = call.plan->program->recvs_from[call.group->rank_of[peer]][header.flow];
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  Landing& landing = landings_[peer];
  const bool twice = header.segment < state.done ||
                     std::any_of(
                         state.arrived.begin(), state.arrived.end(),
                         [&](const auto& came) { return came.segment == header.segment; });
  const bool allowed = (header.flags & kEager) != 0 || header.segment < state.grant_said;
  if (twice || !allowed || header.segment >= state.n_segments ||
      payload.size() != call.segment_bytes(step, header.segment))
    return protocol_error(peer, "sent segment " + std::to_string(header.segment) + " of " +
                                    call.doing() + " twice, unasked, or with a wrong length of " +
                                    std::to_string(payload.size()) + " B");
  const bool eager = (header.flags & kEager) != 0;
  if (step.gate != Place::kNoGate && !eager) {
    // The peer sends this only after consuming our own segment: that send is done.
    complete_below(
        call, call.plan->program->sends_to[step.peer][step.gate],
        std::min(header.segment + 1,
                 call.state[call.plan->program->sends_to[step.peer][step.gate]].started));
  }
  const bool landed = landing.in_place &&
                      payload.data() == call.segment_at(step.buffer, step.chunk, header.segment);
  if (header.segment == state.done && state.done < call.segments_ready(step)) {
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
  StepState& state = call.state[at];
  const bool in_slot = (header.flags & kInSlot) != 0;
  if (header.count == 0 || header.count > state.n_segments - header.segment)
    return protocol_error(call.group->members[call.plan->program->steps[at].peer],
                          "offered segments that " + call.doing() + " does not have");
  add_offer(call, at,
            {header.segment, header.count, in_slot ? kArenaRegion : place.region, place.offset,
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
  const uint32_t at = call.plan->program->sends_to[from][header.flow];
  complete_below(call, at, std::min(header.segment, call.state[at].started));
}

void Engine::on_placed(Collective& call, const Header& header, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  if (header.count == 0 || header.count > header.segment ||
      header.segment > call.state[at].grant_said)
    return protocol_error(call.group->members[step.peer],
                          "put segments of " + call.doing() + " that were not granted");
  if (step.gate != Place::kNoGate) {
    const uint32_t before = call.plan->program->sends_to[step.peer][step.gate];
    complete_below(call, before, std::min(header.segment, call.state[before].started));
  }
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
