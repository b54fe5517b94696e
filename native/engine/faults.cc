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
  // All the same if something is in flight: want of memory may have cut an earlier try short.
  if (group.poison && group.in_flight.empty()) return;
  if (!group.poison && why.fault == Fault::kTimedOut && on_deadline) on_deadline(group);
  tell &= !group.poison;
  if (!group.poison) group.poison = why;
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

// Another rank tells us that a group has ended.
void Engine::on_abort(int peer, const Header& header, std::span<std::byte> payload) {
  const auto known = groups_.find(header.group);
  const bool is_born = known != groups_.end() && known->second->born;
  if (is_born && known->second->rank_of[peer] < 0)
    return protocol_error(peer, "ended a group it is not in");
  const auto told = [&](const Ending& ending) { return ending.group == header.group; };
  if (std::any_of(endings_.begin(), endings_.end(), told)) return;
  if (known == groups_.end() ? was_dropped(header.group) : bool{known->second->poison}) return;
  const auto fault = header.count > 0 && header.count <= static_cast<uint32_t>(Fault::kInternal)
                         ? static_cast<Fault>(header.count)
                         : Fault::kClosed;
  const int culprit = header.flow < names_.size() ? static_cast<int>(header.flow) : peer;
  const Error why = {fault, culprit, printable(payload)};
  if (!is_born) return end_unborn(peer, header.group, why);
  endings_.push_back({header.group, why, 0});
}

// Another rank has lost its link with the rank `header.flow`. What it says of its own link is true
// whoever is to blame; of ours with that rank it says nothing.
void Engine::on_lost(int peer, const Header& header, std::span<std::byte> payload) {
  if (header.flow >= names_.size() || static_cast<int>(header.flow) == peer)
    return protocol_error(peer, "lost a rank that there is not");
  const int other = static_cast<int>(header.flow);
  if (other == rank_) return gave_up(peer, "this rank " + printable(payload));
  severed(peer, other, printable(payload));
  // Nobody who waits for it to come back has heard better of it.
  if (links_[other] != nullptr && links_[other]->is_suspended())
    peer_lost(other, who(peer) + " gave it up: " + printable(payload));
}

// Groups that hold two ranks who have lost each other end: the second counts as the one lost.
void Engine::severed(int one, int other, const std::string& why) {
  constexpr size_t kKept = 256;  // of words; one such text for each pair of ranks is kept
  if (!severed_.emplace(std::pair{one, other}, why.substr(0, kKept)).second) return;
  for (const auto& [id, group] : groups_)
    if (group->born && !group->poison && group->rank_of[one] >= 0 && group->rank_of[other] >= 0)
      endings_.push_back({id, {Fault::kPeerLost, other, why}, 0});
}

bool Engine::is_runnable(uint64_t group) const {
  return std::any_of(runnable_.begin(), runnable_.end(),
                     [&](const auto& call) { return !call->finished && call->group->id == group; });
}

// Ends the groups that others said have ended, one turn after they said so: what came before their
// word, on other links too, is used first, and a call that it completes ends well.
void Engine::settle_endings() {
  // A call that goes on for longer than this would have to be a very long one, of a group that has
  // lost a member; other groups are not waited for at all.
  constexpr int kMostTurns = 16;
  std::vector<Ending> endings = std::exchange(endings_, {});
  for (Ending& ending : endings) {
    const auto group = groups_.find(ending.group);
    if (group == groups_.end()) continue;
    const bool waits = ending.n_turns == 0 || is_runnable(ending.group);
    if (waits && ++ending.n_turns <= kMostTurns) {
      endings_.push_back(std::move(ending));
      continue;
    }
    // Passed on: nobody shall hear of our leaving before the reason for it.
    abort_group(*group->second, ending.why, true);
  }
}

void Engine::peer_lost(int peer, const std::string& why) {
  if (peer_state_[peer] != PeerState::kAlive) return;
  breaking_.push_back({peer, why, false});
}

// The peer counts us as lost and will never read us again: so is it for us, before anything else.
void Engine::gave_up(int peer, const std::string& why) {
  breaking_.push_front({peer, "gave this rank up: " + why, true});
}

void Engine::broken(int peer, const Error& error) { peer_lost(peer, error.text); }

void Engine::protocol_error(int peer, const std::string& what) {
  peer_lost(peer, "broke the protocol: it " + what);
}

void Engine::settle_broken() {
  while (!breaking_.empty()) {
    // Who ends a group and then leaves has said why: that comes first.
    if (!endings_.empty() && !breaking_.front().at_once) break;
    const Breaking next = std::move(breaking_.front());
    breaking_.pop_front();
    if (peer_state_[next.peer] == PeerState::kLeft)
      settle_departed(next.peer);
    else if (peer_state_[next.peer] == PeerState::kAlive)
      end_link(next.peer, next.why, !next.at_once);
  }
  flush();
}

// The link with a peer is gone, whoever is to blame. `tell`: every other rank hears so and ends the
// groups that hold both, NOT where the peer has given us up, and tells them of us in its own words.
void Engine::end_link(int peer, const std::string& why, bool tell) {
  peer_state_[peer] = PeerState::kLost;
  Header header;
  header.type = FrameType::kLost;
  header.flow = static_cast<uint32_t>(peer);
  if (links_[peer] != nullptr) {
    send_text(peer, header, why);  // it may live: then it must know
    links_[peer]->flush(*this);
    // A socket with unread data would take the words back: it goes with the next tick.
    if (!links_[peer]->lingers()) links_[peer]->close();
    graveyard_.push_back(std::move(links_[peer]));  // perhaps still on the stack above us
  }
  std::erase_if(texts_, [&](const auto& entry) { return entry.second.peer == peer; });
  encoded_.drop_peer(peer);
  slots_.drop_peer(peer);
  for (size_t other = 0; other < names_.size() && tell; ++other)
    if (links_[other] != nullptr) send_text(static_cast<int>(other), header, why);
  for (auto& [id, group] : groups_)
    if (group->born && group->rank_of[peer] >= 0)
      abort_group(*group, {Fault::kPeerLost, peer, why}, false);
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

void Engine::end_groups(const Error& why, bool tell) {
  for (auto& [id, group] : groups_) abort_group(*group, why, tell);
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
  traffic_.sample(now);
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (peer_state_[peer] != PeerState::kAlive || links_[peer] == nullptr) continue;
    links_[peer]->look(*this, now);
    if (now - said_ns_[peer] >= options_.heartbeat_ns && !links_[peer]->shares_memory()) {
      Frame frame;
      frame.header.type = FrameType::kHeartbeat;
      send(static_cast<int>(peer), frame);
    }
    const int64_t silent = now - std::max(heard_ns_[peer], links_[peer]->listens_since());
    if (silent >= options_.dead_ns)
      peer_lost(static_cast<int>(peer), "was silent for " + seconds(silent));
  }
  grant_overdue_scratch();
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

bool Engine::is_overdue(int64_t now) const {
  const auto late = [&](const auto& entry) { return now >= entry.second->deadline_ns; };
  return std::any_of(groups_.begin(), groups_.end(), [&](const auto& entry) {
    const auto& calls = entry.second->in_flight;
    return std::any_of(calls.begin(), calls.end(), late);
  });
}

// A call of small messages does not announce itself to ranks that it sends nothing. If they called
// something else under its key, nobody would find out before the deadline.
void Engine::greet_late(Collective& call) {
  if (call.greeted_all || now_ - call.posted_ns < options_.heartbeat_ns) return;
  call.greeted_all = true;
  for (const int peer : call.plan->program->peers)
    if (!is_held(call, peer)) send_open(call, peer);
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
