// How a group ends before its time: disagreement, abort, deadlines, silence and death.
#include <algorithm>
#include <utility>

#include "engine/engine.h"

namespace shoal {
namespace {

std::string seconds(int64_t ns) {
  const int64_t tenths = ns / 100'000'000;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

// What a peer wrote goes into exceptions and logs: no control characters, no broken UTF-8.
std::string printable(std::span<const std::byte> payload) {
  std::string text(reinterpret_cast<const char*>(payload.data()), payload.size());
  for (char& c : text)
    if (c < ' ' || c > '~') c = '?';
  return text;
}

}  // namespace

std::string Engine::who(int peer) const { return names_[peer]; }

// Two ranks called different things under one key. Each tells the other what it called, in words,
// and both end the group for everyone.
void Engine::disagree(Collective& call, int peer) {
  Group& group = *call.group;
  group.disputed = true;
  // One word is enough, and a peer that sends more than it reads must not fill our memory.
  if (!group.disputed_with.insert(peer).second) return;
  if (peer_state_[peer] == PeerState::kLeft)
    return abort_group(group,
                       {Fault::kMismatch, peer,
                        who(rank_) + " called " + call.plan->descriptor + ", but " + who(peer) +
                            " called something else, and has left since"},
                       true);
  Header header = frame_for(call, FrameType::kDisagree, 0, 0).header;
  send_text(peer, header, call.plan->descriptor);
}

void Engine::on_disagree(const Group& group, const Plan& mine, uint64_t, int peer,
                         std::span<std::byte> payload) {
  const std::string theirs = printable(payload);
  std::string one = who(rank_) + " called " + mine.descriptor;
  std::string other = who(peer) + " called " + theirs;
  if (peer < rank_) std::swap(one, other);  // the same words whoever says them
  abort_group(*groups_.at(group.id),
              {Fault::kMismatch, peer,
               one + ", but " + other +
                   "; every rank of a group must make the same calls in the same order"},
              true);
}

// Two ranks disagree on the block that one sends to the other. Whoever finds out tells everyone;
// both would use the same words.
void Engine::lengths_differ(Collective& call, int from, int to, uint64_t sent, uint64_t taken) {
  const auto name = [&](int rank) { return who(call.group->members[rank]); };
  const size_t item = size_of(call.plan->dtype);
  const int other = from == call.group->rank ? to : from;
  abort_group(
      *call.group,
      {Fault::kMismatch, call.group->members[other],
       "in " + call.plan->descriptor + " " + name(from) + " sends " + std::to_string(sent / item) +
           " elements to " + name(to) + ", which takes " + std::to_string(taken / item) +
           " from it; what one rank sends another must be as long on both"},
      true);
}

void Engine::abort_group(Group& group, const Error& why, bool tell) {
  if (group.poison) return;
  group.poison = why;
  if (tell) {
    Header header;
    header.type = FrameType::kAbort;
    header.group = group.id;
    header.flow = static_cast<uint32_t>(why.peer);
    header.count = static_cast<uint32_t>(why.fault);
    for (const int member : group.members)
      if (member != rank_) send_text(member, header, why.text);
  }
  group.receiving.clear();  // these calls are in flight too
  const auto in_flight = group.in_flight;
  for (const auto& [key, call] : in_flight) {
    Error error = why;
    error.doing = call->doing();
    finish(*call, error);
  }
  for (auto& [key, frames] : std::exchange(group.early, {})) discard_early(std::move(frames));
  flush();
}

// Another rank tells us that a group or a peer is done for.
void Engine::on_end_of_group(int peer, const Header& header, std::span<std::byte> payload) {
  const std::string text = printable(payload);
  const int culprit = header.flow < names_.size() ? static_cast<int>(header.flow) : peer;
  if (header.type == FrameType::kLost) {
    if (culprit != rank_) return peer_lost(culprit, text);
    // They gave us up. Nothing of this mesh can be trusted any more, and nobody must believe what
    // we say of the others, who are well.
    given_up_ = true;
    for (size_t other = 0; other < names_.size(); ++other)
      if (peer_state_[other] == PeerState::kAlive)
        breaking_.emplace_back(static_cast<int>(other), "gave this rank up: " + text);
    return;
  }
  if (dropped_groups_.count(header.group) != 0) return;
  auto& slot = groups_[header.group];
  if (slot == nullptr) {
    slot = std::make_shared<Group>();
    slot->id = header.group;
  }
  Group& group = *slot;
  if (group.born && group.rank_of[peer] < 0)
    return protocol_error(peer, "ended a group it is not in");
  const auto fault = header.count > 0 && header.count <= static_cast<uint32_t>(Fault::kInternal)
                         ? static_cast<Fault>(header.count)
                         : Fault::kClosed;
  // Of a group that this process has yet to make: its calls shall fail too, not wait.
  if (!group.born && !group.poison) group.poisoned_by = peer;
  endings_.push_back({group.id, {fault, culprit, text}, false});
}

// Ends the groups that others said have ended, one turn after they said so: what came before their
// word, on other links too, is used first, and a call that it completes ends well.
void Engine::settle_endings() {
  std::vector<Ending> endings = std::exchange(endings_, {});
  for (Ending& ending : endings) {
    const auto group = groups_.find(ending.group);
    if (group == groups_.end()) continue;
    if (!ending.ripe || !runnable_.empty()) {
      ending.ripe = true;
      endings_.push_back(ending);
      continue;
    }
    // Passed on: nobody shall hear of our leaving before the reason for it.
    abort_group(*group->second, ending.why, true);
  }
}

void Engine::peer_lost(int peer, const std::string& why) {
  if (peer_state_[peer] != PeerState::kAlive) return;
  breaking_.emplace_back(peer, why);
}

void Engine::broken(int peer, const Error& error) { peer_lost(peer, error.text); }

void Engine::protocol_error(int peer, const std::string& what) {
  peer_lost(peer, "broke the protocol: it " + what);
}

void Engine::settle_broken() {
  // Who ends a group and then leaves has said why: that comes first.
  if (!endings_.empty()) return;
  while (!breaking_.empty()) {
    const auto [peer, why] = std::move(breaking_.front());
    breaking_.erase(breaking_.begin());
    if (peer_state_[peer] == PeerState::kLeft) {
      settle_departed(peer);
      continue;
    }
    if (peer_state_[peer] != PeerState::kAlive) continue;
    peer_state_[peer] = PeerState::kLost;
    Header header;
    header.type = FrameType::kLost;
    header.flow = static_cast<uint32_t>(peer);
    if (links_[peer] != nullptr) {
      if (!given_up_)
        send_text(peer, header, why);  // it may live: then it must know that it is out
      links_[peer]->flush(*this);
      links_[peer]->close();
      graveyard_.push_back(std::move(links_[peer]));  // perhaps still on the stack above us
    }
    std::erase_if(texts_, [gone = peer](const auto& entry) { return entry.second.peer == gone; });
    slots_.drop_peer(peer);
    for (size_t other = 0; other < names_.size() && !given_up_; ++other)
      if (links_[other] != nullptr) send_text(static_cast<int>(other), header, why);
    for (auto& [id, group] : groups_)
      if (group->born && group->rank_of[peer] >= 0)
        abort_group(*group, {Fault::kPeerLost, peer, why}, false);
  }
  flush();
}

// A peer said goodbye. Calls that have all they need from it go on; its link stays, since what it
// offered in shared memory still lies there.
void Engine::settle_departed(int peer) {
  const Error left = {Fault::kPeerLost, peer,
                      "left the group (it closed it, or its program ended)"};
  for (auto& [id, group] : groups_) {
    if (!group->born || group->rank_of[peer] < 0) continue;
    if (!group->departed) group->departed = left;
    // A disputed group waits for the other side's words, which may not come any more.
    const bool stuck = group->disputed ||
                       std::any_of(group->in_flight.begin(), group->in_flight.end(),
                                   [&](const auto& entry) { return needs(*entry.second, peer); });
    // Told to all: who does not need the departed may wait for us.
    if (stuck) abort_group(*group, left, true);
  }
}

// Whether a call still waits for something that `peer` has not said or done yet.
bool Engine::needs(const Collective& call, int peer) const {
  if (call.unmatched) return nobody_sends(*call.group);
  const int from = call.group->rank_of[peer];
  const Program& program = *call.plan->program;
  for (const uint32_t at : program.recvs_from[from]) {
    const StepState& state = call.state[at];
    uint32_t n_here = state.done + static_cast<uint32_t>(state.arrived.size());
    for (const Offered& offer : state.offered) {
      const uint32_t end = offer.first + offer.count;
      n_here += end - std::min(end, std::max(offer.first, state.done));
    }
    if (n_here < state.n_segments) return true;
  }
  return std::any_of(program.sends_to[from].begin(), program.sends_to[from].end(),
                     [&](uint32_t at) { return call.state[at].done < call.state[at].n_segments; });
}

void Engine::say_goodbye() {
  Frame frame;
  frame.header.type = FrameType::kGoodbye;
  for (size_t peer = 0; peer < links_.size(); ++peer)
    if (links_[peer] != nullptr) send(static_cast<int>(peer), frame);
  flush();
}

bool Engine::has_queued() const {
  for (size_t peer = 0; peer < links_.size(); ++peer)
    if (peer_state_[peer] == PeerState::kAlive && links_[peer] != nullptr &&
        links_[peer]->has_queued())
      return true;
  return false;
}

void Engine::pump_all() {
  for (size_t peer = 0; peer < links_.size(); ++peer)
    if (links_[peer] != nullptr) links_[peer]->pump(*this);
  progress();
}

void Engine::end_groups() {
  for (auto& [id, group] : groups_)
    abort_group(*group, {Fault::kClosed, -1, "the group was closed with this call in flight"},
                false);
}

bool Engine::lingers() {
  bool any = false;
  for (const auto& link : links_) any |= link != nullptr && link->lingers();
  return any;
}

void Engine::close() {
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (links_[peer] == nullptr) continue;
    links_[peer]->close();
    graveyard_.push_back(std::move(links_[peer]));
    peer_state_[peer] = PeerState::kLeft;
  }
}

void Engine::tick(int64_t now) {
  // If this process itself was stopped, it knows nothing about who was silent meanwhile.
  if (now - last_tick_ns_ > options_.suspect_ns)
    for (int64_t& heard : heard_ns_) heard = std::max(heard, now - options_.heartbeat_ns);
  last_tick_ns_ = now_ = now;
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (peer_state_[peer] != PeerState::kAlive || links_[peer] == nullptr) continue;
    if (now - said_ns_[peer] >= options_.heartbeat_ns && !links_[peer]->shares_memory()) {
      Frame frame;
      frame.header.type = FrameType::kHeartbeat;
      send(static_cast<int>(peer), frame);
    }
    const int64_t silent = now - heard_ns_[peer];
    if (silent >= options_.dead_ns)
      peer_lost(static_cast<int>(peer), "was silent for " + seconds(silent));
  }
  for (auto& [id, group] : groups_) {
    for (const auto& [key, call] : group->in_flight) {
      if (now < call->deadline_ns) {
        greet_late(*call);
        continue;
      }
      abort_group(*group,
                  {Fault::kTimedOut, -1,
                   who(rank_) + " reached the deadline of " + call->doing() + " waiting for " +
                       awaited(*call)},
                  true);
      break;  // in_flight is empty now
    }
  }
  flush();
  settle_broken();
  graveyard_.clear();
}

// A call of small messages does not announce itself to ranks that it sends nothing. If they called
// something else under its key, nobody would find out before the deadline.
void Engine::greet_late(Collective& call) {
  if (call.greeted_all || now_ - call.posted_ns < options_.heartbeat_ns) return;
  call.greeted_all = true;
  for (const int peer : call.plan->program->peers) send_open(call, peer);
}

// Whether a frame of `call` has come from that rank of the group, so that it has made the call too.
bool Engine::is_in(const Collective& call, size_t rank) const {
  const auto& flows = call.plan->program->recvs_from[rank];
  return call.peer_open[rank] || std::any_of(flows.begin(), flows.end(), [&](uint32_t at) {
           const StepState& state = call.state[at];
           return state.done > 0 || !state.arrived.empty() || !state.offered.empty();
         });
}

// The ranks that owe `call` something it could use now, or if there are none, those that do not
// take what it has for them. Of these, those that have not made the call, if there are any: the
// others may be waiting for the same culprit themselves.
std::string Engine::awaited(const Collective& call) const {
  if (call.unmatched) return "a message to it";
  constexpr size_t kNamed = 8;  // more would bury the rest of the message
  std::vector<bool> owes(call.group->members.size(), false);
  std::vector<bool> takes_not = owes;
  for (uint32_t at = 0; at < call.state.size(); ++at) {
    const Step& step = call.plan->program->steps[at];
    const StepState& state = call.state[at];
    if (step.peer < 0 || state.done >= call.segments_ready(step)) continue;
    const bool is_here =
        step.kind == StepKind::kRecv &&
        (std::any_of(state.arrived.begin(), state.arrived.end(),
                     [&](const Arrived& came) { return came.segment == state.done; }) ||
         (!state.offered.empty() && state.offered.front().first <= state.done));
    if (!is_here) (step.kind == StepKind::kRecv ? owes : takes_not)[step.peer] = true;
  }
  if (std::find(owes.begin(), owes.end(), true) == owes.end()) owes = takes_not;
  std::vector<bool> absent = owes;
  for (size_t rank = 0; rank < owes.size(); ++rank) absent[rank] = owes[rank] && !is_in(call, rank);
  const bool all_in = std::find(absent.begin(), absent.end(), true) == absent.end();
  if (!all_in) owes = absent;
  const size_t n_owing = static_cast<size_t>(std::count(owes.begin(), owes.end(), true));
  std::string text;
  size_t n_named = 0;
  for (size_t rank = 0; rank < owes.size() && n_named < kNamed; ++rank) {
    if (!owes[rank]) continue;
    text += (n_named++ == 0 ? "" : ", ") + who(call.group->members[rank]);
  }
  if (n_owing > kNamed) text += " and " + std::to_string(n_owing - kNamed) + " more";
  if (n_owing == 0) return "this rank's own turn";
  return all_in ? text + " (in the same call, perhaps waiting for another rank)" : text;
}

}  // namespace shoal
