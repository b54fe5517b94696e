// How this rank parts with others: broken links, silence, doubts, and the news of it.
#include <algorithm>
#include <utility>

#include "engine/engine.h"

namespace shoal {
namespace {

std::string seconds(int64_t ns) {
  const int64_t tenths = ns / 100'000'000;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

}  // namespace

// ---- a link is gone, or should be: dealt with after the current frame or step, never inside it

void Engine::broken(int peer, const Error& error) {
  calls_.drop_peer(peer);
  if (!error.of_path) return peer_lost(peer, error.text);
  const auto how = error.is_unmet ? Breaking::kUnmet : Breaking::kNoPath;
  breaking_.push_back({peer, how, {Verdict::kDead, peer, rank_, error.text}});
}

void Engine::protocol_error(int peer, const std::string& what) {
  peer_lost(peer, "broke the protocol: it " + what);
}

void Engine::peer_lost(int peer, const std::string& why) {
  breaking_.push_back({peer, Breaking::kParted, {Verdict::kEvicted, peer, rank_, why}});
}

// The peer counts us as lost and will never read us again: so is it for us, before anything else.
void Engine::evicted_us(int peer, const std::string& why) {
  breaking_.push_front(
      {peer, Breaking::kEvictedUs, {Verdict::kEvicted, peer, rank_, "gave this rank up: " + why}});
}

void Engine::settle_broken() {
  do {
    while (!breaking_.empty()) {
      // Who ends a group and then leaves has said why: that comes first.
      if (!endings_.empty() && breaking_.front().how != Breaking::kEvictedUs) return flush();
      const Breaking next = std::move(breaking_.front());
      breaking_.pop_front();
      settle(next);
    }
    doubts_.settle(now_);
  } while (!breaking_.empty());
  flush();
}

void Engine::settle(const Breaking& broken) {
  const int peer = broken.peer;
  if (peers_.is(peer, PeerState::kLeft)) {
    if (broken.how == Breaking::kGoodbye)
      settle_departed(peer, "left the group (it closed it, or its program ended)");
    return;
  }
  if (!peers_.lives(peer) && !peers_.is_doubted(peer)) return;
  // NOT by its link alone: it may live, and only the way to it be gone.
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

// The process of a peer was looked for, for the first time and in vain: it left in good order, or
// it died. Nothing here waits for it, so nothing ends; what will is told why.
void Engine::miss(int peer, const std::string& why) {
  if (!peers_.become(peer, PeerState::kGone)) return;
  links_.remove(peer);
  ways_.drop_peer(peer);
  calls_.drop_peer(peer);
  news_.pass_again();
  settle_departed(peer, why);
}

// Parts with a peer for good. `tell`: NOT where it has given us up, and says so in its own words.
void Engine::part(int peer, Loss loss, bool tell) {
  loss.why.resize(std::min(loss.why.size(), Loss::kMostWords));
  const bool is_new = losses_.add(loss);
  if (!is_new) loss = *losses_.between(rank_, peer);  // as it was told to us
  end_link(peer, loss);
  end_groups_of(loss);
  if (is_new && tell) news_.pass(loss.header(), loss.why, {}, {}, now_);
}

void Engine::end_link(int peer, const Loss& loss) {
  peers_.become(peer, PeerState::kLost);
  if (links_[peer] != nullptr) {
    // It may live: then it must know. Who never was connected is told when it comes (PathMaker).
    Loss told = loss;
    if (loss.verdict != Verdict::kCut) told = {Verdict::kEvicted, peer, rank_, loss.why};
    if (!is_unlinked(peer)) send_text(peer, told.header(), told.why);
    links_[peer]->flush(*this);
    // A socket with unread data would take the words back: it goes with the next tick.
    if (!links_[peer]->lingers()) links_[peer]->close();
    links_.remove(peer);
  }
  ways_.drop_peer(peer);
  calls_.drop_peer(peer);
  doubts_.forget(peer);
  news_.pass_again();
}

void Engine::end_groups_of(const Loss& loss) {
  for (auto& [id, group] : groups_)
    if (loss.ends(group->rank_of)) abort_group(*group, loss.error_on(rank_), false);
}

// ---- silence

// The longest that it takes a rank that is asked to know: until it counts the other as silent.
int64_t Engine::patience() const { return options_.dead_ns + options_.heartbeat_ns; }

void Engine::listen_to(int peer) {
  links_[peer]->look(*this, now_);
  if (links_[peer]->is_unlinked()) return;
  if (now_ - links_.said_ns(static_cast<size_t>(peer)) >= options_.heartbeat_ns &&
      !links_[peer]->shares_memory()) {
    Frame frame;
    frame.header.type = FrameType::kHeartbeat;
    send(peer, frame);
  }
  const int64_t since = std::max(heard_ns_[peer], links_[peer]->listens_since());
  const bool is_silent = now_ - since >= options_.dead_ns;
  if (!is_silent) return heard(peer);
  if (!peers_.become(peer, PeerState::kSilent)) return;
  const std::string why = "was silent for " + seconds(options_.dead_ns);
  news_.pass_again();
  if (losses_.between(rank_, peer) == nullptr)
    doubts_.begin(peer, why, now_ + patience());
  else
    peer_lost(peer, why);
}

void Engine::heard(int peer) {
  if (peers_.is(peer, PeerState::kSilent) && peers_.become(peer, PeerState::kAlive))
    doubts_.forget(peer);
}

// If this process itself was stopped, it knows nothing about who was silent meanwhile.
void Engine::excuse_silence(int64_t now) {
  if (now - last_tick_ns_ <= options_.suspect_ns) return;
  for (int64_t& heard : heard_ns_) heard = std::max(heard, now - options_.heartbeat_ns);
  doubts_.wait_until(now + patience());
}

// ---- asking a third

void Engine::ask(int peer, int about) {
  Frame frame;
  frame.header.type = FrameType::kAsk;
  frame.header.flow = static_cast<uint32_t>(about);
  send(peer, frame);
}

void Engine::answer(int peer, int about, Hears what) {
  Frame frame;
  frame.header.type = FrameType::kAnswer;
  frame.header.flow = static_cast<uint32_t>(about);
  frame.header.count = static_cast<uint32_t>(what);
  reply(peer, frame);
}

// Milliseconds where the network is whole; who asks gives up later than that.
std::optional<int64_t> Engine::first_answer_by(int peer) const {
  constexpr int64_t kMostNs = 2'000'000'000;
  const Link* link = links_[peer];
  const bool is_new = link != nullptr && (link->is_unlinked() || link->is_suspended());
  return is_new ? std::optional(now_ + kMostNs) : std::nullopt;
}

void Engine::on_asking(int peer, const Header& header) {
  const auto about = static_cast<int>(header.flow);
  const bool asks = header.type == FrameType::kAsk;
  if (header.flow >= names_.size() || (asks && about == peer) || header.count > kMostHears)
    return protocol_error(peer, "asked for a rank that there is not");
  if (asks) return doubts_.on_ask(peer, about);
  doubts_.on_answer(peer, about, static_cast<Hears>(header.count));
}

// What a doubt has come to.
void Engine::conclude(Loss loss) {
  const int peer = loss.culprit == rank_ ? loss.other : loss.culprit;
  doubts_.forget(peer);
  breaking_.push_back({peer, Breaking::kParted, std::move(loss)});
}

// ---- news

// Another rank was lost, to whom it may be: what is said of our own link counts only where it comes
// from its other end.
void Engine::on_lost(int peer, const Header& header, std::span<std::byte> payload) {
  auto loss = Loss::from(header, printable(payload), static_cast<int>(names_.size()));
  if (!loss) return protocol_error(peer, "lost a rank that there is not");
  if (loss->is_between(rank_, peer)) {
    if (loss->verdict == Verdict::kCut)
      return breaking_.push_front({peer, Breaking::kEvictedUs, std::move(*loss)});
    if (loss->culprit == rank_) return evicted_us(peer, "this rank " + loss->why);
  }
  if (losses_.add(*loss)) endings_.push_back({0, {}, std::move(loss), {peer}, 0});
}

// Passed on: nobody shall hear of our leaving before the reason for it.
void Engine::settle(Ending& ending) {
  if (ending.loss) {
    const Loss& loss = *ending.loss;
    for (const int one : {loss.culprit, loss.other}) {
      const Loss* ours = one == rank_ ? nullptr : losses_.between(rank_, one);
      if (ours != nullptr && (peers_.is_doubted(one) || is_unlinked(one))) part(one, *ours, false);
    }
    end_groups_of(loss);
    return news_.pass(loss.header(), loss.why, {}, ending.from, now_);
  }
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
