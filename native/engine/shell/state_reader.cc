#include "engine/shell/state_reader.h"

#include <algorithm>
#include <cstdio>
#include <limits>
#include <map>
#include <utility>

#include "engine/segments/needs.h"

namespace shoal {
namespace {

// Limits over all calls. A step takes about 1 KiB here, and 200 bytes in the file.
constexpr size_t kMostCalls = 1024;
constexpr size_t kMostSteps = 4096;
// Per group: calls that others have made and this rank has not.
constexpr size_t kMostEarly = 64;

// 64 bits fit into no JSON number that every reader keeps whole.
std::string hex(uint64_t number) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016llx", static_cast<unsigned long long>(number));
  return text;
}

std::string agreement_of(uint32_t descriptor, Subject subject) {
  return hex(uint64_t{descriptor} << 32 | subject);
}

const char* name_of(StepKind kind) {
  switch (kind) {
    case StepKind::kSend:
      return "send";
    case StepKind::kRecv:
      return "recv";
    case StepKind::kCopy:
      return "copy";
    default:
      return "finish";
  }
}

uint64_t bytes_in(const ChunkLayout& layout) {
  uint64_t n_bytes = 0;
  for (const uint64_t chunk : layout.n_bytes) n_bytes += chunk;
  return n_bytes;
}

// The memory that the caller gave: DATA, or the larger of INPUT and OUTPUT.
uint64_t bytes_of(const Plan& plan) {
  uint64_t most = 0;
  for (int buffer = 0; buffer < kScratch; ++buffer)
    most = std::max(most, bytes_in(plan.layout[buffer]));
  return most;
}

const char* name_of(PathState::Is is) {
  switch (is) {
    case PathState::Is::kUnmade:
      return "unmade";
    case PathState::Is::kDialled:
      return "dialled";
    case PathState::Is::kOpen:
      return "open";
    case PathState::Is::kLost:
      return "lost";
    default:
      return "ended";
  }
}

}  // namespace

Value StateReader::read() {
  List groups, peers;
  for (const auto& [id, one] : engine_.groups_) groups.push_back(group(*one));
  for (int peer_rank = 0; peer_rank < static_cast<int>(engine_.names_.size()); ++peer_rank)
    peers.push_back(peer(peer_rank));
  const Staging& staging = engine_.staging_;
  return Fields{{"taken_ns", now_},
                {"rank", engine_.rank_},
                {"size", static_cast<uint64_t>(engine_.names_.size())},
                {"n_in_flight", static_cast<uint64_t>(engine_.n_in_flight())},
                {"groups", std::move(groups)},
                {"peers", std::move(peers)},
                {"staging", Fields{{"ceiling_bytes", uint64_t{engine_.options_.staging_bytes}},
                                   {"reserved_bytes", uint64_t{staging.reserved()}},
                                   {"used_bytes", uint64_t{staging.used()}},
                                   {"peak_bytes", uint64_t{staging.peak()}}}},
                {"scratch_bytes", static_cast<uint64_t>(engine_.scratch_bytes())}};
}

// ---- groups

Value StateReader::group(const Group& group) {
  std::vector<const Call*> order;
  uint64_t last_number = 0;
  for (const auto& [key, one] : group.in_flight) order.push_back(one.get());
  for (const Call* one : order)
    if (FinishedCalls::is_counted(one->key)) last_number = std::max(last_number, one->key);
  for (const uint64_t key : group.finished.keys())
    if (FinishedCalls::is_counted(key)) last_number = std::max(last_number, key);
  std::sort(order.begin(), order.end(),
            [](const auto* one, const auto* other) { return one->serial < other->serial; });
  List calls, members;
  for (const Call* one : order) {
    if (n_calls_listed_ == kMostCalls) break;
    n_calls_listed_++;
    calls.push_back(call(*one));
  }
  for (const int member : group.members) members.push_back(member);
  const uint64_t n_left_out = order.size() - calls.size();
  return Fields{{"id", hex(group.id)},
                {"is_made", group.is_made()},
                {"rank", group.rank},
                {"members", std::move(members)},
                {"n_calls", group.n_calls},
                {"last_number", last_number},
                {"ended", group.life.has_ended() ? Value(group.life.why().text) : Value()},
                {"in_flight", std::move(calls)},
                {"n_in_flight_left_out", n_left_out},
                {"made_by_others", early(group)},
                {"n_plans_served", uint64_t{group.served.plans.size()}},
                {"n_waiting_for_room", uint64_t{group.served.waiting.size()}},
                {"finished", finished(group)}};
}

// Calls that others have made, whose frames wait here for this rank to make them too.
Value StateReader::early(const Group& group) const {
  List calls;
  for (const auto& [key, frames] : group.early) {
    if (calls.size() == kMostEarly) break;
    std::vector<int> from;
    for (const Early& frame : frames)
      if (std::find(from.begin(), from.end(), frame.peer) == from.end()) from.push_back(frame.peer);
    if (from.empty()) continue;
    List peers(from.begin(), from.end());
    calls.push_back(Fields{{"key", hex(key)},
                           {"agreement", agreement_of(frames.front().header.descriptor,
                                                      frames.front().header.subject)},
                           {"by", std::move(peers)}});
  }
  return calls;
}

Value StateReader::finished(const Group& group) const {
  List calls;
  const auto& keys = group.finished.keys();
  for (size_t at = keys.size() - std::min(keys.size(), kLastFinished); at < keys.size(); ++at)
    calls.push_back(Fields{{"key", hex(keys[at])}, {"what", group.finished.past(keys[at]).what()}});
  return calls;
}

// ---- calls

Value StateReader::call(const Call& call) {
  const uint64_t n_steps = static_cast<uint64_t>(
      std::count_if(call.state.begin(), call.state.end(),
                    [](const StepState& state) { return state.n_segments > 0; }));
  const bool has_deadline = call.deadline_ns != std::numeric_limits<int64_t>::max();
  const char* scratch = "none";
  if (call.plan->scratch_bytes > 0) scratch = call.scratch.memory != nullptr ? "held" : "not yet";
  if (call.scratch.memory == nullptr && call.scratch.wanted_ns >= 0) scratch = "awaited";
  if (call.is_served) scratch = call.windows.n_held > 0 ? "held" : "not yet";
  const uint64_t listed_before = n_steps_listed_;
  Value listed_steps = steps(call);
  List uncommitted;
  for (const int from : call.commits.with)
    if (call.commits.owed_by[from]) uncommitted.push_back(call.group->members[from]);
  const uint64_t n_listed = n_steps_listed_ - listed_before;
  return Fields{{"serial", call.serial},
                {"key", hex(call.key)},
                {"what", call.what()},
                {"agreement", agreement_of(call.plan->descriptor_hash, call.subject)},
                {"n_bytes", bytes_of(*call.plan)},
                {"age_s", seconds_since(call.posted_ns)},
                {"left_s", has_deadline ? Value(-seconds_since(call.deadline_ns)) : Value()},
                {"awaits_message", call.unmatched},
                {"is_served", call.is_served},
                {"uncommitted", std::move(uncommitted)},
                {"scratch", scratch},
                {"scratch_bytes", call.plan->scratch_bytes},
                {"n_steps", n_steps},
                {"n_steps_left", call.steps_left},
                {"n_steps_left_out", uint64_t{call.steps_left} - n_listed},
                {"peers", peers_of(call)},
                {"steps", std::move(listed_steps)}};
}

// The steps that are not over. Those that wait for another step of this rank come last, if there is
// room.
Value StateReader::steps(const Call& call) {
  List unfinished;
  for (const bool request_turn : {false, true}) {
    for (uint32_t at = 0; at < call.state.size(); ++at) {
      if (n_steps_listed_ == kMostSteps) return unfinished;
      if (call.state[at].done == call.state[at].n_segments) continue;
      const char* what = awaits(call, at);
      if ((what == std::string_view("turn")) != request_turn) continue;
      n_steps_listed_++;
      unfinished.push_back(step(call, at, what));
    }
  }
  return unfinished;
}

Value StateReader::step(const Call& call, uint32_t at, const char* awaits) const {
  const Step& step = call.plan->program->steps[at];
  const StepState& state = call.state[at];
  Fields fields = {{"step", at},
                   {"kind", name_of(step.kind)},
                   {"awaits", awaits},
                   {"since_s", seconds_since(since(call, at))},
                   {"n_bytes", call.plan->chunk_bytes(step.buffer, step.chunk)},
                   {"n_segments", state.n_segments},
                   {"ready", call.segments_ready(step)},
                   {"done", state.done}};
  if (step.peer >= 0) fields.emplace_back("peer", call.group->members[step.peer]);
  if (step.kind == StepKind::kSend) {
    fields.emplace_back("started", state.started);
    fields.emplace_back("granted", call.granted(at));
  }
  if (step.kind == StepKind::kRecv) {
    uint32_t n_offered = 0;
    for (const Offered& offer : state.offered) n_offered += offer.count;
    fields.emplace_back("granted", state.grant_sent);
    fields.emplace_back("arrived", static_cast<uint64_t>(state.arrived.size()));
    fields.emplace_back("offered", n_offered);
  }
  return fields;
}

List StateReader::peers_of(const Call& call) const {
  List peers;
  if (call.unmatched) return peers;
  for (const int from : call.plan->program->peers)
    peers.push_back(Fields{{"rank", call.group->members[from]},
                           {"in_call", is_in(call, static_cast<size_t>(from))},
                           {"held_back", call.is_held(from)}});
  return peers;
}

// When the step, or the last step it depended on, last moved: since then only its peer is missing.
int64_t StateReader::since(const Call& call, uint32_t at) const {
  int64_t last = std::max(call.posted_ns, call.state[at].moved_ns);
  for (const uint32_t before : call.plan->program->steps[at].waits_for)
    last = std::max(last, call.state[before].moved_ns);
  return last;
}

// The reason why a step waits, in the words of docs/dump.md. The checks are in Runner::attempt's
// order.
const char* StateReader::awaits(const Call& call, uint32_t at) const {
  const Step& step = call.plan->program->steps[at];
  if (call.state[at].done >= call.segments_ready(step)) return "turn";
  if (!call.has_memory(step)) return "scratch";
  if (step.peer < 0) return "nothing";
  if (engine_.links_[call.peer_of(step)] == nullptr) return "lost peer";
  if (call.is_held(step.peer)) return "earlier calls";
  return step.kind == StepKind::kSend ? send_awaits(call, at) : recv_awaits(call, at);
}

const char* StateReader::send_awaits(const Call& call, uint32_t at) const {
  const Step& step = call.plan->program->steps[at];
  const StepState& state = call.state[at];
  const Link& link = *engine_.links_[call.peer_of(step)];
  if (state.started >= call.segments_ready(step)) return state.by_reference ? "consumed" : "link";
  if (state.started < call.granted(at)) return state.waits_for_slot ? "slot" : "nothing";
  if (state.is_eager) return state.request_sent ? "credit" : "nothing";
  if (!link.shares_memory()) return "grant";
  if (state.waits_for_slot) return "slot";
  return call.posts.posted_by[step.peer] ? "nothing" : "grant";
}

const char* StateReader::recv_awaits(const Call& call, uint32_t at) const {
  return is_here(call.state[at]) ? "nothing" : "data";
}

// ---- peers

Value StateReader::peer(int rank) const {
  const auto at = static_cast<size_t>(rank);
  const Link* link = engine_.links_[at];
  const LinkState state = link != nullptr ? link->state() : LinkState{};
  const Traffic::Peer& traffic = engine_.traffic_[rank];
  const Traffic::Rates rates = engine_.traffic_.rates(rank, now_);
  List sockets;
  for (const SocketState& socket : state.sockets) {
    if (!socket.is_tcp) continue;
    sockets.push_back(Fields{{"rtt_us", socket.rtt_us},
                             {"rtt_var_us", socket.rtt_var_us},
                             {"congestion_window", socket.congestion_window},
                             {"n_unacked", socket.n_unacked},
                             {"n_retransmits", socket.n_retransmits},
                             {"unsent_bytes", socket.unsent_bytes}});
  }
  List paths;
  for (const PathState& path : state.paths) {
    const bool is_dialled = path.is == PathState::Is::kDialled || path.is == PathState::Is::kLost;
    const bool is_known = is_dialled && path.lost_ns != 0;
    paths.push_back(Fields{{"state", name_of(path.is)},
                           {"is_lost", path.is == PathState::Is::kLost},
                           {"lost_s", is_known ? Value(seconds_since(path.lost_ns)) : Value()},
                           {"why_lost", path.why},
                           {"n_reconnects", path.n_reconnects}});
  }
  const char* kind = link != nullptr ? link->kind() : "none";
  const bool is_linked = link != nullptr && !link->is_unlinked();
  const int64_t last_alive_ns = engine_.parting_.last_alive_ns(at);
  const int64_t last_sent_ns = engine_.links_.last_sent_ns(at);
  return Fields{{"rank", rank},
                {"name", engine_.names_[at]},
                {"state", name_of(engine_.peers_[rank])},
                {"link", kind},
                {"since_received_s", is_linked ? Value(seconds_since(last_alive_ns)) : Value()},
                {"since_sent_s", is_linked ? Value(seconds_since(last_sent_ns)) : Value()},
                {"n_queued", uint64_t{state.n_queued}},
                {"queued_bytes", uint64_t{state.queued_bytes}},
                {"n_frames_out", traffic.n_frames_out},
                {"n_frames_in", traffic.n_frames_in},
                {"n_bytes_out", traffic.n_bytes_out},
                {"n_bytes_in", traffic.n_bytes_in},
                {"slot_bytes_out", traffic.slot_bytes_out},
                {"bytes_out_per_s", rates.out},
                {"bytes_in_per_s", rates.in},
                {"eager_out_bytes", engine_.credits_.out_bytes(rank)},
                {"n_early_frames", engine_.early_.n_kept(rank)},
                {"stalls", Fields{{"no_grant", traffic.no_grant},
                                  {"no_slot", traffic.no_slot},
                                  {"no_credit", traffic.no_credit},
                                  {"no_staging", traffic.no_staging},
                                  {"link_full", state.n_full}}},
                {"paths", std::move(paths)},
                {"sockets", std::move(sockets)}};
}

}  // namespace shoal
