#include "engine/life/faults.h"

#include <algorithm>
#include <utility>

#include "engine/segments/needs.h"

namespace shoal {
namespace {

// Text from a peer goes into exceptions and logs, so replace control characters and broken UTF-8.
std::string printable(std::span<const std::byte> payload) {
  std::string text(reinterpret_cast<const char*>(payload.data()), payload.size());
  for (char& c : text)
    if (c < ' ' || c > '~') c = '?';
  return text;
}

}  // namespace

void Faults::protocol_error(int peer, const std::string& what) {
  parting_.give_up(peer, "broke the protocol: it " + what);
}

void Faults::evicted_us(int peer, const std::string& why) { parting_.evicted_us(peer, why); }

Error Faults::ended(const Group& group) const {
  if (group.life.has_ended()) return group.life.why();
  for (const Ending& ending : endings_)  // reported already, though not settled for earlier calls
    if (concerns(ending, group)) return ending.loss ? ending.loss->error_on(rank_) : ending.why;
  return {};
}

void Faults::launched(Call& call) {
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

// This rank's call in words, and if it serves the call, the rank whose frame started it.
std::string Faults::called(const Call& call) const {
  if (!call.is_served) return call.what();
  return call.what() + ", as " + who((*call.members)[static_cast<size_t>(call.served_for)]) +
         " did";
}

// Two ranks made different calls under one key. Each sends the other its call in words, and both
// end the group for all members.
void Faults::disagree(Call& call, int peer) {
  Group& group = *call.group;
  group.life.dispute();
  // Once is enough: a peer that sends without reading must not fill our memory.
  if (!group.disputed_with.insert(peer).second) return;
  if (peers_.has_left(peer))
    return abort_group(group,
                       {Fault::kMismatch, peer,
                        who(rank_) + " called " + call.what() + ", but " + who(peer) +
                            " made another call, and has left since"},
                       true);
  links_.send_text(peer, call.frame(FrameType::kDisagree, 0, 0).header, called(call));
}

void Faults::on_disagree(const Call& mine, int peer, std::span<std::byte> payload) {
  const std::string theirs = printable(payload);
  std::string one = who(rank_) + " called " + called(mine);
  std::string other = who(peer) + " called " + theirs;
  if (peer < rank_) std::swap(one, other);  // so that both ranks write the same sentence
  abort_group(*mine.group,
              {Fault::kMismatch, peer,
               one + ", but " + other +
                   "; every rank of a group must make the same calls in the same order"},
              true);
}

// Two ranks disagree on the length of the block that one sends to the other. The rank that notices
// reports it to all; both would write the same sentence.
void Faults::lengths_differ(Call& call, int from, int to, uint64_t sent, uint64_t received) {
  const auto name = [&](int rank) { return who(call.group->members[rank]); };
  const size_t item = size_of(call.plan->dtype);
  const int other = from == call.group->rank ? to : from;
  abort_group(*call.group,
              {Fault::kMismatch, call.group->members[other],
               "in " + call.what() + " " + name(from) + " sends " + std::to_string(sent / item) +
                   " elements to " + name(to) + ", which takes " + std::to_string(received / item) +
                   " from it; both ranks must give the same length"},
              true);
}

void Faults::timed_out(const Call& call) {
  abort_group(*call.group,
              {Fault::kTimedOut, -1,
               who(rank_) + " reached the deadline of " + call.doing() + " waiting for " +
                   awaited(call, names_)},
              true);
}

void Faults::spoiled(const Call& call, int peer) {
  abort_group(*call.group,
              {Fault::kMismatch, rank_,
               "the program of " + who(rank_) + " wrote to the memory of " + call.doing() +
                   " while it was being sent to " + who(peer) +
                   "; wait for a call before you write to its buffers"},
              true);
}

// ---- a group ends

void Faults::abort_group(Group& group, const Error& why, bool notify) {
  end_group(group, why, notify, {});
}

void Faults::end_group(Group& group, const Error& found, bool notify,
                       const std::vector<int>& from) {
  // Go on if calls are in flight: an earlier attempt may have run out of memory halfway.
  const bool is_new = !group.life.has_ended();
  if (!is_new && group.in_flight.empty()) return;
  Error why = found;
  const bool is_reported = !from.empty() || why.fault == Fault::kPeerLost;
  if (is_new && hooks_.on_ended) hooks_.on_ended(group, why, is_reported);
  if (is_new && why.fault == Fault::kTimedOut && hooks_.on_deadline) hooks_.on_deadline(group);
  group.life.end(why);
  group.bell.ring();
  if (notify && is_new && group.is_made()) {
    Header header;
    header.type = FrameType::kAbort;
    header.group = group.id;
    header.flow = static_cast<uint32_t>(why.peer);
    header.count = static_cast<uint32_t>(why.fault);
    news_.pass(header, why.text, group.members, from, now_);
  }
  calls_.end_all(group, why);
  links_.flush(sink_);
}

// ---- failures that other ranks report

void Faults::made(Group& group) {
  for (const auto& [by, why] : groups_.take_early_ends(group))
    if (group.rank_of[by] >= 0) abort_group(group, why, true);  // only a member may end the group
}

void Faults::on_abort(int peer, const Header& header, std::span<std::byte> payload) {
  const Group* known = groups_.find(header.group);
  const bool is_made = known != nullptr && known->is_made();
  if (is_made && known->rank_of[peer] < 0)
    return protocol_error(peer, "ended a group it is not in");
  for (Ending& ending : endings_)
    if (!ending.loss && ending.group == header.group) return ending.from.push_back(peer);
  if (!is_made) send_unmade(peer, header.group);
  if (known == nullptr ? groups_.was_dropped(header.group) : known->life.has_ended()) return;
  const auto fault = header.count > 0 && header.count <= static_cast<uint32_t>(Fault::kInternal)
                         ? static_cast<Fault>(header.count)
                         : Fault::kClosed;
  const int culprit = header.flow < names_.size() ? static_cast<int>(header.flow) : peer;
  const Error why = {fault, culprit, printable(payload)};
  if (!is_made) return groups_.end_uncreated(peer, header.group, why);
  endings_.push_back({header.group, why, {}, {peer}, 0});
}

// This rank cannot forward the end of a group whose members it does not know, or no longer knows.
void Faults::send_unmade(int peer, uint64_t group) {
  Frame frame;
  frame.header.type = FrameType::kUnmade;
  frame.header.group = group;
  parting_.reply(peer, frame);
}

void Faults::on_lost(int peer, const Header& header, std::span<std::byte> payload) {
  auto loss = Loss::from(header, printable(payload), static_cast<int>(names_.size()));
  if (!loss) return protocol_error(peer, "reported the loss of a rank that does not exist");
  if (parting_.learn(*loss, peer)) endings_.push_back({0, {}, std::move(loss), {peer}, 0});
}

// The failure is forwarded first: no rank should learn that we leave before it learns why.
void Faults::settle(const Ending& ending) {
  if (ending.loss) return parting_.follow(*ending.loss, ending.from);
  Group* group = groups_.find(ending.group);
  if (group != nullptr) end_group(*group, ending.why, true, ending.from);
}

bool Faults::concerns(const Ending& ending, const Group& group) {
  return ending.loss ? ending.loss->ends(group.rank_of) : ending.group == group.id;
}

bool Faults::is_runnable(const Ending& ending) const {
  return std::any_of(groups_.begin(), groups_.end(), [&](const auto& entry) {
    return concerns(ending, *entry.second) && calls_.can_go_on(entry.first);
  });
}

void Faults::settle_endings() {
  // A call that lasts longer than this would have to be a very long one, of a group that has
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

void Faults::settle_all_endings() {
  for (const Ending& ending : std::exchange(endings_, {})) settle(ending);
}

}  // namespace shoal
