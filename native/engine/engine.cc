// Calls begin and end, and frames leave.
#include "engine/engine.h"

#include <algorithm>
#include <utility>

#include "base/shared_memory.h"

namespace shoal {
namespace {

// Calls whose late frames are still compared, and what may be kept of them: 16 MiB of layouts.
constexpr size_t kFinishedKept = 4096;
constexpr size_t kFinishedChunksKept = 1 << 20;

// Segments of staging promised to a sender at first (bounds.cc): 1 ms at 8 Gbit/s.
constexpr uint32_t kFirstAhead = 8;

// The owner gets this memory back: should the kernel refuse to fence it, going on could be wrong in
// silence.
void take_away(const std::byte* data, size_t n_bytes, Regions::Against against) {
  Error error = Regions::of_process().fence(data, n_bytes, against);
  if (!error) return;
  error.text = "memory of a failed call cannot be taken away from a peer that may still use it: " +
               error.text;
  end_process(error);
}

}  // namespace

Engine::Engine(int rank, std::vector<std::string> names, const Options& options)
    : rank_(rank),
      names_(std::move(names)),
      options_(options),
      staging_(options.staging_bytes),
      encoded_(staging_, names_.size()),
      links_(names_.size()),
      far_(names_.size(), false),
      peer_state_(names_.size(), PeerState::kAlive),
      heard_ns_(names_.size(), 0),
      said_ns_(names_.size(), 0),
      to_flush_(names_.size(), false),
      eager_out_(names_.size(), 0),
      eager_in_(names_.size(), 0),
      credit_due_(names_.size(), 0),
      look_ahead_(names_.size(), kFirstAhead),
      n_early_(names_.size(), 0),
      n_ended_unborn_(names_.size(), 0),
      traffic_(names_.size()),
      landings_(names_.size()),
      ahead_(names_.size(), 0),
      held_(names_.size()) {
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
  far_[peer] = !links_[peer]->shares_memory();
  heard_ns_[peer] = said_ns_[peer] = now;
  last_tick_ns_ = now_ = now;
}

Group& Engine::add_group(uint64_t id, std::vector<int> members) {
  Group& group = groups_.count(id) != 0 ? *groups_[id] : unborn(id);
  group.members = std::move(members);
  group.rank_of.assign(names_.size(), -1);
  for (size_t at = 0; at < group.members.size(); ++at)
    group.rank_of[group.members[at]] = static_cast<int>(at);
  group.rank = group.rank_of[rank_];
  group.born = true;
  dropped_groups_.erase(id);
  for (const auto& [by, why] : std::exchange(group.told, {})) {
    n_ended_unborn_[by]--;
    if (group.rank_of[by] >= 0) abort_group(group, why, true);  // else it had no right to
  }
  // Who has left in good order may have sent what the others still need of it.
  for (const int member : group.members)
    if (peer_state_[member] == PeerState::kLeft && !group.departed)
      group.departed = {Fault::kPeerLost, member, "had left when the group was made"};
  if (const Error missing = missing_in(group)) abort_group(group, missing, false);
  return group;
}

// Why a group can do nothing from the start: a member is lost, or two have lost each other.
Error Engine::missing_in(const Group& group) const {
  for (const int member : group.members)
    if (peer_state_[member] == PeerState::kLost)
      return {Fault::kPeerLost, member, "was gone already when the group was made"};
  for (const auto& [pair, why] : severed_)
    if (group.rank_of[pair.first] >= 0 && group.rank_of[pair.second] >= 0)
      return {Fault::kPeerLost, pair.second, why};
  return {};
}

void Engine::drop_group(Group& group) {
  abort_group(group, {Fault::kClosed, -1, "the group was closed with this call in flight"}, false);
  forget(group);
}

// ---- posting

std::shared_ptr<Collective> Engine::post(Group& group, std::shared_ptr<const Plan> plan,
                                         uint64_t key,
                                         const std::vector<std::vector<std::byte*>>& memory,
                                         int64_t deadline_ns) {
  auto call = prepare(group, std::move(plan), memory, deadline_ns);
  if (!call->finished) launch(*call, key);
  return call;
}

// A call that is not in flight yet; it has failed already if its group has ended.
std::shared_ptr<Collective> Engine::prepare(Group& group, std::shared_ptr<const Plan> plan,
                                            const std::vector<std::vector<std::byte*>>& memory,
                                            int64_t deadline_ns) {
  auto call = std::make_shared<Collective>();
  call->group = &group;
  call->plan = std::move(plan);
  call->serial = ++group.n_calls;
  call->deadline_ns = deadline_ns;
  for (size_t buffer = 0; buffer < memory.size(); ++buffer) call->memory[buffer] = memory[buffer];
  Error ended = group.poison;
  for (const Ending& ending : endings_)  // told already, though not settled for earlier calls
    if (!ended && ending.group == group.id) ended = ending.why;
  if (ended) {
    call->error = ended;
    call->error.doing = call->doing();
    call->finished = true;
  }
  return call;
}

// A call that never was in flight.
std::shared_ptr<Collective> Engine::refuse(Group& group, std::shared_ptr<const Plan> plan,
                                           const Error& why) {
  auto call = prepare(group, std::move(plan), {}, now_);
  if (call->finished) return call;
  call->error = why;
  call->error.doing = call->doing();
  call->finished = true;
  return call;
}

void Engine::launch(Collective& call, uint64_t key) {
  Group& group = *call.group;
  if (group.in_flight.count(key) != 0) {
    call.error = {Fault::kMismatch, -1, "a call with this name is in flight already"};
    call.error.doing = call.doing();
    call.finished = true;
    return;
  }
  const Program& program = *call.plan->program;
  call.key = key;
  if (is_counted(key)) group.last_counted = std::max(group.last_counted, key);
  call.posted_ns = now_;
  call.peer_open.assign(group.members.size(), false);
  call.standing.assign(group.members.size(), Collective::Standing::kFree);
  call.state.resize(program.steps.size());
  choose_codecs(call);
  for (size_t at = 0; at < program.steps.size(); ++at) {
    const Step& step = program.steps[at];
    call.state[at].n_segments = call.plan->n_segments(step);
    if (call.state[at].n_segments > 0) call.steps_left++;
    if (step.kind == StepKind::kRecv && far_[group.members[step.peer]])
      call.n_far_bytes += call.as_encoded(at, call.plan->chunk_bytes(step.buffer, step.chunk));
  }
  group.in_flight[key] = call.shared_from_this();
  ++n_in_flight_;
  count_ahead(call);

  for (uint32_t at = static_cast<uint32_t>(program.steps.size()); at-- > 0;) {
    const Step& step = program.steps[at];
    if (call.state[at].n_segments == 0) continue;
    if (step.waits_for.empty()) make_ready(call, at);
    if (step.kind == StepKind::kRecv && step.gate != Place::kNoGate) grant(call, at);
  }
  // An empty call has nothing to say, since who calls something else under its key will; an empty
  // message has.
  const bool speaks = call.steps_left > 0 || call.plan->by_pair || is_message(key);
  for (const int peer : program.peers)
    if (speaks && !announces_itself(call, peer) && !is_held(call, peer)) send_open(call, peer);
  // Before any data of ours, which may fill the socket: the peer is to send at the same time.
  for (uint32_t at = 0; at < program.steps.size(); ++at) {
    const Step& step = program.steps[at];
    if (step.kind != StepKind::kRecv || !step.waits_for.empty()) continue;
    const Link* link = links_[group.members[step.peer]].get();
    if (link != nullptr && !link->shares_memory() && call.state[at].n_segments > 0) grant(call, at);
  }

  if (const auto early = group.early.find(key); early != group.early.end()) {
    std::vector<Early> frames = std::move(early->second);
    group.early.erase(early);
    for (Early& frame : frames) {
      if (call.finished) break;
      handle(call, frame.peer, frame.header, frame.payload);
      n_early_[std::exchange(frame.peer, rank_)]--;
    }
    discard_early(std::move(frames));
  }
  if (group.departed && !call.finished) {
    for (const int peer : program.peers)
      if (peer_state_[group.members[peer]] == PeerState::kLeft && needs(call, group.members[peer]))
        abort_group(group, group.departed, true);
  }
  if (call.steps_left == 0 && !call.finished) finish(call, {});
}

// Whether the peer will hear of this call without an open frame: a small message is its own
// announcement, in either direction.
bool Engine::announces_itself(const Collective& call, int peer) const {
  const Program& program = *call.plan->program;
  const auto small = [&](uint32_t at) {
    return call.state[at].n_segments > 0 && is_eager(call, at);
  };
  const auto& sends = program.sends_to[peer];
  const auto& recvs = program.recvs_from[peer];
  if (!call.plan->by_pair)
    return std::any_of(sends.begin(), sends.end(), small) ||
           std::any_of(recvs.begin(), recvs.end(), small);
  // Data says how long it is, and a rank that waits for some compares. All else has to be said.
  return !sends.empty() && small(sends[0]) && !recvs.empty() && small(recvs[0]);
}

// The segments of a step below `done` have moved, by whatever way.
void Engine::moved_upto(Collective& call, uint32_t at, uint32_t done) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const uint32_t before = std::exchange(state.done, done);
  state.moved_ns = now_;
  if (step.peer < 0) return;
  const uint64_t n_bytes =
      uint64_t{done - before - 1} * call.plan->segment_bytes + call.segment_bytes(step, done - 1);
  Traffic::Peer& traffic = traffic_[call.group->members[step.peer]];
  (step.kind == StepKind::kSend ? traffic.n_bytes_out : traffic.n_bytes_in) += n_bytes;
}

// Where memory runs out in the middle, the call is still in flight, and all of this happens again.
void Engine::finish(Collective& call, const Error& error) {
  if (call.finished) return;
  Group& group = *call.group;
  if (!error && group.disputed) return;  // nothing succeeds once we know that the ranks differ
  const auto keep = call.shared_from_this();
  call.error = error;
  call.ready.clear();
  for (uint32_t at = 0; at < call.state.size(); ++at) {
    StepState& state = call.state[at];
    if (const uint32_t reserved = std::exchange(state.reserved, 0); reserved > 0)
      staging_.unreserve(reserved * call.as_encoded(at, call.plan->segment_bytes));
    if (!error || (state.arrived.empty() && state.offered.empty())) continue;
    // What came and was not used goes back: the links live on.
    const Step& step = call.plan->program->steps[at];
    for (const Arrived& came : std::exchange(state.arrived, {}))
      if (came.eager)
        owe_credit(group.members[step.peer], eager_cost(call.wire_bytes(at, came.segment)));
    for (const Offered& offer : std::exchange(state.offered, {}))
      if (offer.slot != Slots::kNone && offer.first + offer.count > state.done)
        give_back(group.members[step.peer], offer.slot);
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
    fence(call);
  }
  const bool had_scratch = call.scratch != nullptr;
  give_scratch_back(call);
  // From here on it is over.
  group.in_flight.erase(call.key);
  --n_in_flight_;
  call.finished.store(true, std::memory_order_release);
  if (on_finished) on_finished(call);
  if (!call.unmatched)
    for (const int peer : call.plan->program->peers) leave_ahead(call, peer);
  remember(group, call);
  if (had_scratch) pass_scratch_on();
}

// Whether a call under this key has finished so long ago that nothing is known of it any more.
bool Engine::is_forgotten(const Group& group, uint64_t key) {
  // NOT all below the last: another thread may be about to post an earlier one.
  return is_counted(key) && key + kFinishedKept < group.last_counted;
}

// What a call was, so that a late frame of another call under the same key is noticed.
void Engine::remember(Group& group, const Collective& call) {
  auto& kept = group.finished[call.key];
  if (kept == nullptr)
    group.finished_order.push_back(call.key);
  else
    group.finished_chunks -= kept->n_chunks();
  kept = call.plan;
  group.finished_chunks += kept->n_chunks();
  while (group.finished_order.size() > kFinishedKept ||
         group.finished_chunks > kFinishedChunksKept) {
    const auto oldest = group.finished.find(group.finished_order.front());
    group.finished_order.pop_front();
    group.finished_chunks -= oldest->second->n_chunks();
    group.finished.erase(oldest);
  }
}

// A peer that has yet to hear of the end must neither write to the call's memory any more, nor read
// what the owner does with it now and take that for a result.
void Engine::fence(const Collective& call) {
  const auto n_steps = static_cast<uint32_t>(call.state.size());
  for (uint32_t at = 0; at < n_steps; ++at) {  // NOT in one loop: see Regions::fence
    const Step& step = call.plan->program->steps[at];
    const StepState& state = call.state[at];
    if (state.place_granted && state.done < state.n_segments)
      take_away(call.chunk(step.buffer, step.chunk),
                call.plan->chunk_bytes(step.buffer, step.chunk), Regions::Against::kWrites);
  }
  for (uint32_t at = 0; at < n_steps; ++at) fence_offered(call, at);
}

void Engine::fence_offered(const Collective& call, uint32_t at) {
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

void Engine::send_open(const Collective& call, int peer) {
  Frame frame = frame_for(call, FrameType::kOpen, 0, 0);
  if (call.plan->by_pair) frame.carry(call.lengths_with(peer));
  send(call.group->members[peer], frame);
}

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
  traffic_[peer].n_frames_out++;
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
  is_unflushed_ = false;
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (!to_flush_[peer]) continue;
    to_flush_[peer] = false;
    Link* link = links_[peer].get();
    if (link == nullptr) continue;
    link->flush(*this);
    if (!link->is_unflushed()) continue;
    to_flush_[peer] = true;
    is_unflushed_ = true;
  }
}

}  // namespace shoal
