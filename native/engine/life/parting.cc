#include "engine/life/parting.h"

#include <utility>

#include "engine/segments/needs.h"

namespace shoal {
namespace {

std::string seconds(int64_t ns) {
  const int64_t tenths = ns / 100'000'000;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

}  // namespace

Parting::Parting(int rank, const Options& options, Links& links, Ways& ways, Calls& calls,
                 Groups& groups, Peers& peers, News& news, Judge& judge, FrameSink& sink,
                 const int64_t& now)
    : rank_(rank),
      options_(options),
      links_(links),
      ways_(ways),
      calls_(calls),
      groups_(groups),
      peers_(peers),
      news_(news),
      judge_(judge),
      sink_(sink),
      now_(now),
      doubts_(rank, peers, *this),
      last_alive_ns_(peers.size(), 0) {}

// ---- a link is gone, or should be

void Parting::broken(int peer, const Error& error) {
  calls_.drop_peer(peer);
  if (!error.of_path) return give_up(peer, error.text);
  const auto how = error.is_unmet ? Breaking::kUnmet : Breaking::kNoPath;
  breaking_.push_back({peer, how, {Verdict::kDead, peer, rank_, error.text}});
}

void Parting::give_up(int peer, const std::string& why) {
  breaking_.push_back({peer, Breaking::kParted, {Verdict::kEvicted, peer, rank_, why}});
}

// The peer has given this rank up and will never read from it again; give it up before anything
// else.
void Parting::evicted_us(int peer, const std::string& why) {
  breaking_.push_front(
      {peer, Breaking::kEvictedUs, {Verdict::kEvicted, peer, rank_, "gave this rank up: " + why}});
}

void Parting::left(int peer) {
  if (!peers_.become(peer, PeerState::kLeft)) return;
  doubts_.left(peer);
  news_.pass_again();
  breaking_.push_back({peer, Breaking::kGoodbye, {}});
}

void Parting::settle(bool only_evictions) {
  do {
    while (!breaking_.empty()) {
      if (only_evictions && !is_evicted()) return links_.flush(sink_);
      const Breaking next = std::move(breaking_.front());
      breaking_.pop_front();
      settle(next);
    }
    doubts_.settle(now_);
  } while (!breaking_.empty());
  links_.flush(sink_);
}

void Parting::settle(const Breaking& broken) {
  const int peer = broken.peer;
  if (peers_.is(peer, PeerState::kLeft)) {
    if (broken.how == Breaking::kGoodbye)
      departed(peer, "left the group (it closed it, or its program ended)");
    return;
  }
  if (!peers_.lives(peer) && !peers_.is_doubted(peer)) return;
  // A broken link alone does not show that the peer is dead: only the network may be cut.
  const bool is_known = losses_.between(rank_, peer) != nullptr;
  if (broken.how == Breaking::kUnmet && !is_known && !is_awaited(peer) &&
      !doubts_.is_asked_about(peer))
    return miss(peer, broken.loss.why);
  if ((broken.how == Breaking::kNoPath || broken.how == Breaking::kUnmet) && !is_known) {
    const bool asks = !peers_.is_doubted(peer);
    peers_.become(peer, PeerState::kCut);
    news_.pass_again();
    if (asks) doubts_.begin(peer, broken.loss.why, now_ + patience());
    return;
  }
  part(peer, broken.loss, broken.how != Breaking::kEvictedUs);
}

// True if a call of this rank needs something from the peer.
bool Parting::is_awaited(int peer) const {
  return std::any_of(groups_.begin(), groups_.end(), [&](const auto& entry) {
    const Group& group = *entry.second;
    const auto waits = [&](const auto& one) {
      return one.second->unmatched || needs(*one.second, peer, peers_);
    };
    return group.is_made() && group.rank_of[peer] >= 0 &&
           std::any_of(group.in_flight.begin(), group.in_flight.end(), waits);
  });
}

// The first attempt to connect to a peer found no process: it left in good order, or it died. No
// call here waits for it, so nothing ends now; a later call that needs it fails with `why`.
void Parting::miss(int peer, const std::string& why) {
  if (!peers_.become(peer, PeerState::kGone)) return;
  links_.remove(peer);
  ways_.drop_peer(peer);
  calls_.drop_peer(peer);
  news_.pass_again();
  departed(peer, why);
}

// A peer sent its goodbye. Calls that have all they need from it go on. Its link stays, because the
// segments that it offered in shared memory are still there.
void Parting::departed(int peer, const std::string& how) {
  const Error left = {Fault::kPeerLost, peer, how};
  for (auto& [id, group] : groups_) {
    if (!group->is_made() || group->rank_of[peer] < 0) continue;
    group->life.depart(left);
    // A disputed group waits for the peer's side of the mismatch, which may not come any more.
    const bool stuck =
        group->life.is_disputed() ||
        std::any_of(group->in_flight.begin(), group->in_flight.end(),
                    [&](const auto& entry) { return needs(*entry.second, peer, peers_); });
    // Notify all members: those that do not need the departed rank may wait for this one.
    if (stuck) judge_.abort_group(*group, left, true);
  }
}

// Give a peer up for good. `notify`: broadcast it; false if the peer gave this rank up and does so.
void Parting::part(int peer, Loss loss, bool notify) {
  loss.why.resize(std::min(loss.why.size(), Loss::kMostWords));
  const bool is_new = losses_.add(loss);
  if (!is_new) loss = *losses_.between(rank_, peer);  // as another rank reported it
  end_link(peer, loss);
  end_groups_of(loss);
  if (is_new && notify) news_.pass(loss.header(), loss.why, {}, {}, now_);
}

void Parting::end_link(int peer, const Loss& loss) {
  peers_.become(peer, PeerState::kLost);
  if (links_[peer] != nullptr) {
    // The peer may live, so notify it. A peer that never connected is notified when it does
    // (PathMaker).
    Loss notice = loss;
    if (loss.verdict != Verdict::kCut) notice = {Verdict::kEvicted, peer, rank_, loss.why};
    if (!is_unlinked(peer)) links_.send_text(peer, notice.header(), notice.why);
    links_[peer]->flush(sink_);
    // Closing a socket with unread data would discard the notice, so it is closed at the next tick.
    if (!links_[peer]->lingers()) links_[peer]->close();
    links_.remove(peer);
  }
  ways_.drop_peer(peer);
  calls_.drop_peer(peer);
  doubts_.forget(peer);
  news_.pass_again();
}

void Parting::end_groups_of(const Loss& loss) {
  for (auto& [id, group] : groups_)
    if (loss.ends(group->rank_of)) judge_.abort_group(*group, loss.error_on(rank_), false);
}

bool Parting::is_unlinked(int peer) const {
  return links_[peer] != nullptr && links_[peer]->is_unlinked();
}

// ---- losses that other ranks report

// A report about a link of this rank counts only if it comes from the link's other end.
bool Parting::learn(const Loss& loss, int from) {
  const bool is_ours = loss.is_between(rank_, from);
  if (is_ours && loss.verdict == Verdict::kCut)
    breaking_.push_front({from, Breaking::kEvictedUs, loss});
  else if (is_ours && loss.culprit == rank_)
    evicted_us(from, "this rank " + loss.why);
  else
    return losses_.add(loss);
  return false;
}

void Parting::follow(const Loss& loss, const std::vector<int>& from) {
  for (const int one : {loss.culprit, loss.other}) {
    const Loss* ours = one == rank_ ? nullptr : losses_.between(rank_, one);
    if (ours != nullptr && (peers_.is_doubted(one) || is_unlinked(one))) part(one, *ours, false);
  }
  end_groups_of(loss);
  news_.pass(loss.header(), loss.why, {}, from, now_);
}

void Parting::made(Group& group) {
  // A member that left in good order may have sent all that the others still need.
  for (const int member : group.members)
    if (peers_.has_left(member))
      group.life.depart({Fault::kPeerLost, member, "had left when the group was made"});
  if (const Loss* loss = losses_.ends(group.rank_of))
    judge_.abort_group(group, loss->error_on(rank_), false);
}

// ---- silence

// How long a rank may take to answer: until it counts the peer in question as silent.
int64_t Parting::patience() const {
  return std::max(options_.dead_ns, options_.stalled_ns) + options_.heartbeat_ns;
}

void Parting::mark_alive(int peer) {
  last_alive_ns_[static_cast<size_t>(peer)] = now_;
  end_silence(peer);
}

void Parting::alive_at(int peer, int64_t when) {
  int64_t& last = last_alive_ns_[static_cast<size_t>(peer)];
  last = std::max(last, when);
}

void Parting::end_silence(int peer) {
  if (peers_.is(peer, PeerState::kSilent) && peers_.become(peer, PeerState::kAlive))
    doubts_.forget(peer);
}

void Parting::listen(int64_t last_ns) {
  if (now_ - last_ns > options_.suspect_ns) excuse_silence(now_ - last_ns);
  for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer)
    if (links_[peer] != nullptr && (peers_.lives(peer) || peers_.is(peer, PeerState::kSilent)))
      listen_to(peer);
}

// If this process itself was stopped, silence in that time says nothing about the peers. Silence
// before it counts, or a process that is often late would never find a peer silent.
void Parting::excuse_silence(int64_t absent_ns) {
  for (int64_t& last : last_alive_ns_)
    last = std::max(last, std::min(last + absent_ns, now_ - options_.heartbeat_ns));
  doubts_.wait_until(now_ + patience());
}

void Parting::listen_to(int peer) {
  links_[peer]->look(sink_, now_);
  if (links_[peer]->is_unlinked()) return;
  if (now_ - links_.last_sent_ns(static_cast<size_t>(peer)) >= options_.heartbeat_ns &&
      !links_[peer]->shares_memory()) {
    Frame frame;
    frame.header.type = FrameType::kHeartbeat;
    links_.send(peer, frame);
  }
  const int64_t since =
      std::max(last_alive_ns(static_cast<size_t>(peer)), links_[peer]->listens_since());
  const int64_t silent_ns = now_ - since;
  if (silent_ns < options_.dead_ns) return end_silence(peer);
  const bool host_answers = links_[peer]->owed_ns() < options_.dead_ns / 2;
  if (host_answers && silent_ns < options_.stalled_ns) return;
  if (!peers_.become(peer, PeerState::kSilent)) return;
  const std::string why = "was silent for " + seconds(silent_ns);
  news_.pass_again();
  if (losses_.between(rank_, peer) == nullptr)
    doubts_.begin(peer, why, now_ + patience());
  else
    give_up(peer, why);
}

// ---- asking a third

void Parting::ask(int peer, int about) {
  Frame frame;
  frame.header.type = FrameType::kAsk;
  frame.header.flow = static_cast<uint32_t>(about);
  links_.send(peer, frame);
}

void Parting::answer(int peer, int about, Answer what) {
  Frame frame;
  frame.header.type = FrameType::kAnswer;
  frame.header.flow = static_cast<uint32_t>(about);
  frame.header.count = static_cast<uint32_t>(what);
  reply(peer, frame);
}

void Parting::reply(int peer, const Frame& frame) {
  if (!links_.answer(peer, frame)) judge_.protocol_error(peer, "requests answers and reads none");
}

// Takes milliseconds if the network works; the asking rank gives up later than that.
std::optional<int64_t> Parting::first_answer_by(int peer) const {
  constexpr int64_t kMostNs = 2'000'000'000;
  const Link* link = links_[peer];
  const bool is_new = link != nullptr && (link->is_unlinked() || link->is_suspended());
  return is_new ? std::optional(now_ + kMostNs) : std::nullopt;
}

void Parting::on_asking(int peer, const Header& header) {
  const auto about = static_cast<int>(header.flow);
  const bool asks = header.type == FrameType::kAsk;
  if (header.flow >= peers_.size() || (asks && about == peer) || header.count > kLastAnswer)
    return judge_.protocol_error(peer, "asked about a rank that does not exist");
  if (asks) return doubts_.on_ask(peer, about);
  doubts_.on_answer(peer, about, static_cast<Answer>(header.count));
}

// Act on the outcome of a doubt.
void Parting::conclude(Loss loss) {
  const int peer = loss.culprit == rank_ ? loss.other : loss.culprit;
  doubts_.forget(peer);
  breaking_.push_back({peer, Breaking::kParted, std::move(loss)});
}

}  // namespace shoal
