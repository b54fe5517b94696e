// How a group ends before its time: disagreement, abort, deadlines, silence and death.
#include <algorithm>
#include <utility>

#include "engine/engine.h"
#include "engine/needs.h"

namespace shoal {

// What a peer wrote goes into exceptions and logs: no control characters, no broken UTF-8.
std::string Engine::printable(std::span<const std::byte> payload) {
  std::string text(reinterpret_cast<const char*>(payload.data()), payload.size());
  for (char& c : text)
    if (c < ' ' || c > '~') c = '?';
  return text;
}

std::string Engine::who(int peer) const { return names_[peer]; }

void Engine::protocol_error(int peer, const std::string& what) {
  parting_.give_up(peer, "broke the protocol: it " + what);
}

void Engine::evicted_us(int peer, const std::string& why) { parting_.evicted_us(peer, why); }

Error Engine::ended(const Group& group) const {
  if (group.life.has_ended()) return group.life.why();
  for (const Ending& ending : endings_)  // told already, though not settled for earlier calls
    if (concerns(ending, group)) return ending.loss ? ending.loss->error_on(rank_) : ending.why;
  return {};
}

void Engine::launched(Call& call) {
  Group& group = *call.group;
  if (!group.life.departed()) return;
  const auto has_left = [&](int from) {
    const int peer = group.members[from];
    return peers_.has_left(peer) && needs(call, peer, peers_);
  };
  const auto& peers = call.plan->program->peers;
  const bool stuck = call.unmatched ? nobody_sends(group, peers_)
                                    : std::any_of(peers.begin(), peers.end(), has_left);
  if (stuck) abort_group(group, group.life.departed(), true);
}

// Two ranks called different things under one key. Each tells the other what it called, in words,
// and both end the group for everyone.
void Engine::disagree(Call& call, int peer) {
  Group& group = *call.group;
  group.life.dispute();
  // One word is enough, and a peer that sends more than it reads must not fill our memory.
  if (!group.disputed_with.insert(peer).second) return;
  if (peers_.has_left(peer))
    return abort_group(group,
                       {Fault::kMismatch, peer,
                        who(rank_) + " called " + call.plan->descriptor + ", but " + who(peer) +
                            " called something else, and has left since"},
                       true);
  send_text(peer, call.frame(FrameType::kDisagree, 0, 0).header, call.plan->descriptor);
}

void Engine::on_disagree(Group& group, const Plan& mine, int peer, std::span<std::byte> payload) {
  const std::string theirs = printable(payload);
  std::string one = who(rank_) + " called " + mine.descriptor;
  std::string other = who(peer) + " called " + theirs;
  if (peer < rank_) std::swap(one, other);  // the same words whoever says them
  abort_group(group,
              {Fault::kMismatch, peer,
               one + ", but " + other +
                   "; every rank of a group must make the same calls in the same order"},
              true);
}

// Two ranks disagree on the block that one sends to the other. Whoever finds out tells everyone;
// both would use the same words.
void Engine::lengths_differ(Call& call, int from, int to, uint64_t sent, uint64_t received) {
  const auto name = [&](int rank) { return who(call.group->members[rank]); };
  const size_t item = size_of(call.plan->dtype);
  const int other = from == call.group->rank ? to : from;
  abort_group(
      *call.group,
      {Fault::kMismatch, call.group->members[other],
       "in " + call.plan->descriptor + " " + name(from) + " sends " + std::to_string(sent / item) +
           " elements to " + name(to) + ", which takes " + std::to_string(received / item) +
           " from it; what one rank sends another must be as long on both"},
      true);
}

void Engine::end_group(Group& group, const Error& found, bool tell, const std::vector<int>& from) {
  // All the same if something is in flight: want of memory may have cut an earlier try short.
  const bool is_new = !group.life.has_ended();
  if (!is_new && group.in_flight.empty()) return;
  Error why = found;
  const bool is_heard = !from.empty() || why.fault == Fault::kPeerLost;
  if (is_new && hooks.on_ended) hooks.on_ended(group, why, is_heard);
  if (is_new && why.fault == Fault::kTimedOut && hooks.on_deadline) hooks.on_deadline(group);
  group.life.end(why);
  if (tell && is_new && group.is_made()) {
    Header header;
    header.type = FrameType::kAbort;
    header.group = group.id;
    header.flow = static_cast<uint32_t>(why.peer);
    header.count = static_cast<uint32_t>(why.fault);
    news_.pass(header, why.text, group.members, from, now_);
  }
  calls_.end_all(group, why);
  flush();
}

// Another rank tells us that a group has ended.
void Engine::on_abort(int peer, const Header& header, std::span<std::byte> payload) {
  const Group* known = groups_.find(header.group);
  const bool is_made = known != nullptr && known->is_made();
  if (is_made && known->rank_of[peer] < 0)
    return protocol_error(peer, "ended a group it is not in");
  for (Ending& ending : endings_)
    if (!ending.loss && ending.group == header.group) return ending.from.push_back(peer);
  if (!is_made) say_unmade(peer, header.group);
  if (known == nullptr ? groups_.was_dropped(header.group) : known->life.has_ended()) return;
  const auto fault = header.count > 0 && header.count <= static_cast<uint32_t>(Fault::kInternal)
                         ? static_cast<Fault>(header.count)
                         : Fault::kClosed;
  const int culprit = header.flow < names_.size() ? static_cast<int>(header.flow) : peer;
  const Error why = {fault, culprit, printable(payload)};
  if (!is_made) return groups_.end_uncreated(peer, header.group, why);
  endings_.push_back({header.group, why, {}, {peer}, 0});
}

// This rank cannot pass on that a group has ended: it does not know the members, or not any more.
void Engine::say_unmade(int peer, uint64_t group) {
  Frame frame;
  frame.header.type = FrameType::kUnmade;
  frame.header.group = group;
  parting_.reply(peer, frame);
}

// Nobody shall hear of our leaving before the reason for it, and we pass on nothing more.
void Engine::say_goodbye() {
  for (Ending& ending : std::exchange(endings_, {})) settle(ending);
  Frame frame;
  frame.header.type = FrameType::kGoodbye;
  for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer) {
    if (links_[peer] == nullptr) continue;
    // Who was never connected hears it if it ever comes.
    if (!peers_.has_left(peer) && !links_[peer]->is_unlinked()) news_.tell_all(peer);
    send(peer, frame);
  }
  flush();
}

bool Engine::owes_first_data() const {
  for (size_t peer = 0; peer < links_.size(); ++peer)
    if (peers_.lives(static_cast<int>(peer)) && links_[peer] != nullptr &&
        links_[peer]->owes_first_data())
      return true;
  return false;
}

bool Engine::has_queued() const {
  for (size_t peer = 0; peer < links_.size(); ++peer)
    if (peers_.lives(static_cast<int>(peer)) && links_[peer] != nullptr &&
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
  for (size_t peer = 0; peer < links_.size(); ++peer)
    any |= links_[peer] != nullptr && links_[peer]->lingers();
  return any;
}

void Engine::close() {
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (links_[peer] == nullptr) continue;
    links_[peer]->close();
    links_.remove(static_cast<int>(peer));
    calls_.drop_peer(static_cast<int>(peer));
    peers_.become(static_cast<int>(peer), PeerState::kLeft);
  }
}

void Engine::tick(int64_t now) {
  const int64_t last_ns = std::exchange(now_, now);
  traffic_.sample(now);
  news_.forget_old(now);
  parting_.listen(last_ns);
  scratch_.grant_overdue();
  for (auto& [id, group] : groups_) {
    for (const auto& [key, call] : group->in_flight) {
      if (now < call->deadline_ns) {
        post_notices_.greet_late(*call, now - options_.heartbeat_ns);
        continue;
      }
      abort_group(*group,
                  {Fault::kTimedOut, -1,
                   who(rank_) + " reached the deadline of " + call->doing() + " waiting for " +
                       awaited(*call, names_)},
                  true);
      break;  // in_flight is empty now
    }
  }
  flush();
  parting_.settle(!endings_.empty());
  links_.destroy_removed();
}

bool Engine::is_overdue(int64_t now) const {
  const auto late = [&](const auto& entry) { return now >= entry.second->deadline_ns; };
  return std::any_of(groups_.begin(), groups_.end(), [&](const auto& entry) {
    const auto& calls = entry.second->in_flight;
    return std::any_of(calls.begin(), calls.end(), late);
  });
}

void Engine::on_lost(int peer, const Header& header, std::span<std::byte> payload) {
  auto loss = Loss::from(header, printable(payload), size());
  if (!loss) return protocol_error(peer, "lost a rank that there is not");
  if (parting_.hear_of(*loss, peer)) endings_.push_back({0, {}, std::move(loss), {peer}, 0});
}

// Passed on: nobody shall hear of our leaving before the reason for it.
void Engine::settle(Ending& ending) {
  if (ending.loss) return parting_.follow(*ending.loss, ending.from);
  Group* group = groups_.find(ending.group);
  if (group != nullptr) end_group(*group, ending.why, true, ending.from);
}

bool Engine::concerns(const Ending& ending, const Group& group) {
  return ending.loss ? ending.loss->ends(group.rank_of) : ending.group == group.id;
}

bool Engine::is_runnable(const Ending& ending) const {
  return std::any_of(groups_.begin(), groups_.end(), [&](const auto& entry) {
    return concerns(ending, *entry.second) && calls_.can_go_on(entry.first);
  });
}

// Settles what others said has ended, one turn after they said so: what came before their word, on
// other links too, is used first, and a call that it completes ends well.
void Engine::settle_endings() {
  // A call that goes on for longer than this would have to be a very long one, of a group that has
  // lost a member; other groups are not waited for at all.
  constexpr int kMostTurns = 16;
  std::vector<Ending> endings = std::exchange(endings_, {});
  for (Ending& ending : endings) {
    const bool waits = ending.n_turns == 0 || is_runnable(ending);
    if (waits && ++ending.n_turns <= kMostTurns)
      endings_.push_back(std::move(ending));
    else
      settle(ending);
  }
}

}  // namespace shoal
