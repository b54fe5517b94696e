#include "engine/segments/turns.h"

#include <algorithm>
#include <utility>

namespace shoal {
namespace {

constexpr uint64_t kNobody = UINT64_MAX;
// Plans choose segments so short that a turn is no longer than this, but at least 32 KiB.
constexpr size_t kShortTurn = 256u << 10;

}  // namespace

void Turns::join(Call& call) {
  const Program& program = *call.plan->program;
  // Peers that share memory lend segments in their own order, which could deadlock with turns.
  for (const int peer : program.peers)
    if (!links_.is_far((*call.members)[peer])) return;
  for (uint32_t at = 0; at < program.steps.size(); ++at) {
    const Step& step = program.steps[at];
    const StepState& state = call.state[at];
    if (step.kind == StepKind::kSend && step.waits_for.empty() && state.n_segments > 0 &&
        !state.is_eager && links_.is_far(call.peer_of(step)))
      call.turns.sends.push_back(at);
  }
  if (call.turns.sends.size() < 2) call.turns.sends.clear();
  for (const uint32_t at : call.turns.sends) call.state[at].takes_turns = true;
  size_t turn_bytes = 0;
  for (const uint32_t at : call.turns.sends) turn_bytes += call.wire_bytes(at, 0);
  if (turn_bytes > kShortTurn) call.turns.least_out = turn_bytes;
  // Over all buffers, not these sends alone: turns must be the same on all ranks, or they deadlock.
  for (int buffer = 0; buffer < kScratch && !call.turns.sends.empty(); ++buffer)
    for (const uint64_t n_bytes : call.plan->layout[buffer].n_bytes)
      call.turns.longest = std::max(call.turns.longest, n_bytes);
}

// The turn of a send's next segment: how far the longest chunk is by then, in bytes.
uint64_t Turns::turn_of(const Call& call, uint32_t at) {
  const StepState& state = call.state[at];
  return state.started * call.turns.longest / state.n_segments;
}

bool Turns::is_granted(const Call& call, uint32_t at) {
  const StepState& state = call.state[at];
  return state.started < state.n_segments && state.started < call.granted(at);
}

uint64_t Turns::least_turn(const Call& call) {
  uint64_t least = kNobody;
  for (const uint32_t at : call.turns.sends) {
    const StepState& state = call.state[at];
    const bool is_in = call.posts.posted_by[call.plan->program->steps[at].peer];
    if (is_in && state.started < state.n_segments) least = std::min(least, turn_of(call, at));
  }
  return least;
}

bool Turns::may_send(Call& call, uint32_t at) {
  if (!call.state[at].takes_turns || !is_granted(call, at)) return true;
  if (turn_of(call, at) > call.turns.upto) advance(call);
  if (turn_of(call, at) > call.turns.upto) return false;
  if (has_room(call)) return true;
  if (!std::exchange(call.turns.is_waiting, true)) {
    const auto later = [](uint64_t order, const Waiting& other) { return order < other.order; };
    const auto at = std::upper_bound(waiting_.begin(), waiting_.end(), call.order, later);
    waiting_.insert(at, {call.order, call.weak_from_this()});
  }
  return false;
}

void Turns::left(Call& call, uint32_t at, uint64_t token, size_t n_bytes) {
  if (!call.state[at].takes_turns) return;
  if (token != 0) {
    const int peer = call.peer_of(call.plan->program->steps[at]);
    sent_[token] = {call.order, peer, n_bytes};
    out_[static_cast<size_t>(peer)] += n_bytes;
  }
  advance(call);
}

// The turn may also go back, for a peer that has made the call only now.
void Turns::advance(Call& call) {
  const uint64_t least = least_turn(call);
  if (least == kNobody) return;
  if (std::exchange(call.turns.upto, least) < least) make_due_ready(call);
}

// The step made ready last is attempted first, so end with the first of the schedule.
void Turns::make_due_ready(Call& call) {
  for (auto at = call.turns.sends.rbegin(); at != call.turns.sends.rend(); ++at)
    if (is_granted(call, *at) && turn_of(call, *at) <= call.turns.upto)
      steps_.make_ready(call, *at);
}

void Turns::acknowledged(uint64_t token) {
  const auto sent = sent_.find(token);
  if (sent == sent_.end()) return;
  forget(sent);
  pass_on();
}

bool Turns::has_room(const Call& call) const {
  size_t n_bytes = 0;
  for (const int peer : call.plan->program->peers)
    n_bytes += out_[static_cast<size_t>((*call.members)[peer])];
  return n_bytes < std::max(most_out_, call.turns.least_out);
}

void Turns::pass_on() {
  std::erase_if(waiting_, [&](const auto& waiting) {
    const auto call = waiting.call.lock();
    if (call == nullptr || call->ended) return true;
    if (!has_room(*call)) return false;
    call->turns.is_waiting = false;
    make_due_ready(*call);
    return true;
  });
}

void Turns::forget(std::unordered_map<uint64_t, Sent>::iterator sent) {
  out_[static_cast<size_t>(sent->second.peer)] -= sent->second.n_bytes;
  sent_.erase(sent);
}

void Turns::drop_peer(int peer) {
  for (auto sent = sent_.begin(); sent != sent_.end();) {
    const auto next = std::next(sent);
    if (sent->second.peer == peer) forget(sent);
    sent = next;
  }
  pass_on();
}

void Turns::drop_call(const Call& call) {
  for (auto sent = sent_.begin(); sent != sent_.end();) {
    const auto next = std::next(sent);
    if (sent->second.call == call.order) forget(sent);
    sent = next;
  }
  pass_on();
}

}  // namespace shoal
