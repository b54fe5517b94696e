// How a group ends before its time: disagreement, abort, deadlines, silence and death.
#include <algorithm>

#include "engine/engine.h"

namespace shoal {
namespace {

std::string seconds(int64_t ns) {
  const int64_t tenths = ns / 100'000'000;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

}  // namespace

std::string Engine::who(int peer) const { return names_[peer]; }

// Two ranks called different things under one key. Each tells the other what it called, in words,
// and both end the group for everyone.
void Engine::disagree(Collective& call, int peer) {
  Header header = frame_for(call, FrameType::kDisagree, 0, 0).header;
  send_text(peer, header, call.plan->descriptor);
}

void Engine::on_disagree(const Group& group, const Plan& mine, uint64_t, int peer,
                         std::span<std::byte> payload) {
  const std::string theirs(reinterpret_cast<const char*>(payload.data()), payload.size());
  std::string one = who(rank_) + " called " + mine.descriptor;
  std::string other = who(peer) + " called " + theirs;
  if (peer < rank_) std::swap(one, other);  // the same words whoever says them
  abort_group(*groups_.at(group.id),
              {Fault::kMismatch, peer,
               one + ", but " + other +
                   "; every rank of a group must make the same calls in the same order"},
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
  const auto in_flight = group.in_flight;
  for (const auto& [key, call] : in_flight) {
    Error error = why;
    error.doing = call->doing();
    finish(*call, error);
  }
  group.early.clear();
  group.n_early = 0;
  flush();
}

// Another rank tells us that a group or a peer is done for.
void Engine::on_end_of_group(int peer, const Header& header, std::span<std::byte> payload) {
  const std::string text(reinterpret_cast<const char*>(payload.data()), payload.size());
  const int culprit = header.flow < names_.size() ? static_cast<int>(header.flow) : peer;
  if (header.type == FrameType::kLost) {
    if (culprit != rank_) return peer_lost(culprit, text);
    // They gave us up. Nothing of this mesh can be trusted any more.
    for (size_t other = 0; other < names_.size(); ++other)
      if (peer_state_[other] == PeerState::kAlive)
        breaking_.emplace_back(static_cast<int>(other), "gave this rank up: " + text);
    return;
  }
  const auto group = groups_.find(header.group);
  if (group == groups_.end() || !group->second->born) return;
  const auto fault = header.count > 0 && header.count <= static_cast<uint32_t>(Fault::kInternal)
                         ? static_cast<Fault>(header.count)
                         : Fault::kClosed;
  abort_group(*group->second, {fault, culprit, text}, false);
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
  while (!breaking_.empty()) {
    const auto [peer, why] = std::move(breaking_.front());
    breaking_.erase(breaking_.begin());
    if (links_[peer] == nullptr) continue;
    const bool left = peer_state_[peer] == PeerState::kLeft;
    if (!left) peer_state_[peer] = PeerState::kLost;
    graveyard_.push_back(std::move(links_[peer]));  // perhaps still on the stack above us
    graveyard_.back()->close();
    slots_.drop_peer(peer);
    if (!left) {
      Header header;
      header.type = FrameType::kLost;
      header.flow = static_cast<uint32_t>(peer);
      for (size_t other = 0; other < names_.size(); ++other)
        if (links_[other] != nullptr) send_text(static_cast<int>(other), header, why);
    }
    const std::string text = left ? "left the group (it closed it, or its program ended)" : why;
    for (auto& [id, group] : groups_)
      if (group->born && group->rank_of[peer] >= 0)
        abort_group(*group, {Fault::kPeerLost, peer, text}, false);
  }
  flush();
}

void Engine::say_goodbye() {
  Frame frame;
  frame.header.type = FrameType::kGoodbye;
  for (size_t peer = 0; peer < links_.size(); ++peer)
    if (links_[peer] != nullptr) send(static_cast<int>(peer), frame);
  flush();
}

bool Engine::has_queued() const {
  return std::any_of(links_.begin(), links_.end(),
                     [](const auto& link) { return link != nullptr && link->has_queued(); });
}

void Engine::pump_all() {
  for (size_t peer = 0; peer < links_.size(); ++peer)
    if (links_[peer] != nullptr) links_[peer]->pump(*this);
  progress();
}

void Engine::close() {
  for (auto& [id, group] : groups_)
    abort_group(*group, {Fault::kClosed, -1, "the group was closed with this call in flight"},
                false);
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
    if (links_[peer] == nullptr) continue;
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
      if (now < call->deadline_ns) continue;
      std::string waiting;
      const Program& program = *call->plan->program;
      for (uint32_t at = 0; at < program.steps.size(); ++at) {
        const Step& step = program.steps[at];
        const StepState& state = call->state[at];
        if (step.peer < 0 || state.done == state.n_segments) continue;
        const std::string& name = who(group->members[step.peer]);
        if (waiting.find(name) == std::string::npos)
          waiting += (waiting.empty() ? "" : ", ") + name;
      }
      abort_group(*group,
                  {Fault::kTimedOut, -1,
                   who(rank_) + " reached the deadline of " + call->doing() + " waiting for " +
                       waiting},
                  true);
      break;  // in_flight is empty now
    }
  }
  flush();
  settle_broken();
  graveyard_.clear();
}

}  // namespace shoal
