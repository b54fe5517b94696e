// What calls and peers may take: scratch under the staging ceiling, frames ahead of the others,
// groups that only others know.
#include <algorithm>
#include <new>
#include <utility>

#include "engine/engine.h"

namespace shoal {
namespace {

// Frames to a peer of calls that it was not heard in; it keeps at most twice as many (frames.cc).
constexpr uint32_t kMostAhead = 1u << 15;
// Smaller scratch is not worth the wait.
constexpr uint64_t kSmallScratch = 64u << 10;
// A call that has waited this long for scratch gets it, whatever the ceiling, one at a time: ranks
// that start many calls in different orders could wait for each other's for ever.
constexpr int64_t kOverdueNs = 5'000'000'000;
// Groups ended by one peer that this rank has yet to make. A peer would have to be ahead by as
// many.
constexpr uint32_t kMostEndedUnborn = 4096;
// Closed groups whose late frames are known to be late.
constexpr size_t kMostDropped = 1u << 16;

// Another of its steps may have taken some meanwhile, and want of memory may have ended its group.
bool lacks_scratch(const Collective& call) { return !call.finished && call.scratch == nullptr; }

// Segments of staging promised per flow whose turn has not come (TCP), at most. 64 x 128 KiB are
// what 10 Gbit/s bring in 7 ms, a few turns of a busy core.
constexpr uint32_t kMostLookAhead = 64;

}  // namespace

// Decides which peers of a new call hear of it now. One that was not heard in many calls before
// gets nothing of this one until it is: what it cannot use yet, it would have to keep.
void Engine::count_ahead(Collective& call) {
  const Group& group = *call.group;
  if (call.steps_left == 0) return;
  const auto early = group.early.find(call.key);
  for (const int from : call.plan->program->peers) {
    const int peer = group.members[from];
    if (early != group.early.end() &&
        std::any_of(early->second.begin(), early->second.end(),
                    [&](const Early& frame) { return frame.peer == peer; }))
      continue;  // it is in the call
    const bool fits = ahead_[peer] == 0 || ahead_[peer] + call.plan->frames_ahead <= kMostAhead;
    if (held_[peer].empty() && fits) {
      call.standing[from] = Collective::Standing::kCounted;
      ahead_[peer] += call.plan->frames_ahead;
    } else {
      call.standing[from] = Collective::Standing::kHeld;
      held_[peer].push_back(call.weak_from_this());
    }
  }
}

// A frame of the call has come from this rank of the group: it keeps nothing of ours any more.
void Engine::heard_in(Collective& call, int from) {
  const bool was_held = is_held(call, from);
  leave_ahead(call, from);
  if (was_held) start_with(call, from);
}

void Engine::leave_ahead(Collective& call, int from) {
  const auto was = std::exchange(call.standing[from], Collective::Standing::kFree);
  if (was != Collective::Standing::kCounted) return;
  const int peer = call.group->members[from];
  ahead_[peer] -= call.plan->frames_ahead;
  release_held(peer);
}

void Engine::release_held(int peer) {
  while (!held_[peer].empty()) {
    const auto call = held_[peer].front().lock();
    const int from = call == nullptr || call->finished ? -1 : call->group->rank_of[peer];
    if (from >= 0 && is_held(*call, from)) {
      if (ahead_[peer] > 0 && ahead_[peer] + call->plan->frames_ahead > kMostAhead) return;
      call->standing[from] = Collective::Standing::kCounted;
      ahead_[peer] += call->plan->frames_ahead;
      start_with(*call, from);
    }
    held_[peer].pop_front();
  }
}

// What launch() does for the peers that hear of a call at once.
void Engine::start_with(Collective& call, int from) {
  const Program& program = *call.plan->program;
  if (!announces_itself(call, from)) send_open(call, from);
  for (const uint32_t at : program.recvs_from[from])
    if (program.steps[at].waits_for.empty() || program.steps[at].gate != Place::kNoGate)
      grant(call, at);
  for (const uint32_t at : program.sends_to[from]) make_ready(call, at);
  for (const uint32_t at : program.recvs_from[from]) make_ready(call, at);
}

// Whether the memory that a step works on is there.
bool Engine::has_memory(const Collective& call, const Step& step) {
  const bool in_scratch =
      step.buffer == kScratch || (step.kind == StepKind::kCopy && step.into_buffer == kScratch);
  return !in_scratch || call.scratch != nullptr;
}

// Gives the call its scratch if there is room under the ceiling, or if no other call has gone
// beyond it; ends its group if there is no memory at all.
bool Engine::take_scratch(Collective& call) {
  const uint64_t n_bytes = call.plan->scratch_bytes;
  if (n_bytes > kSmallScratch && !staging_.reserve(n_bytes)) {
    if (n_overdrawn_ >= most_overdrawn_) return false;
    call.overdraws = true;
    n_overdrawn_++;
  }
  call.scratch.reset(new (std::nothrow) std::byte[n_bytes]);
  if (call.scratch == nullptr) {
    if (n_bytes > kSmallScratch && !call.overdraws) staging_.unreserve(n_bytes);
    abort_group(*call.group,
                {Fault::kResource, rank_,
                 who(rank_) + " has no " + std::to_string(n_bytes) + " B of memory left for " +
                     call.doing()},
                true);
    return false;
  }
  scratch_bytes_ += n_bytes;
  call.memory[kScratch] = {call.scratch.get()};
  for (const uint32_t at : std::exchange(call.wants_scratch, {})) make_ready(call, at);
  return true;
}

void Engine::wait_for_scratch(Collective& call, uint32_t at) {
  if (call.finished) return;  // there was no memory at all
  auto& steps = call.wants_scratch;
  if (steps.empty()) waiting_for_scratch_.push_back(call.weak_from_this());
  if (std::find(steps.begin(), steps.end(), at) == steps.end()) steps.push_back(at);
  if (call.scratch_wanted_ns < 0) call.scratch_wanted_ns = now_;
}

void Engine::give_scratch_back(Collective& call) {
  if (call.scratch == nullptr) return;
  const uint64_t n_bytes = call.plan->scratch_bytes;
  call.scratch.reset();
  call.memory[kScratch].clear();
  scratch_bytes_ -= n_bytes;
  if (std::exchange(call.overdraws, false)) {
    if (--n_overdrawn_ == 0) most_overdrawn_ = 1;
  } else if (n_bytes > kSmallScratch) {
    staging_.unreserve(n_bytes);
  }
}

// To calls that wait for some, now that one has ended. NOT while it ends: where there is no memory
// for theirs, their group ends, which may be its own.
void Engine::pass_scratch_on() {
  for (const auto& waiting : std::exchange(waiting_for_scratch_, {})) {
    const auto other = waiting.lock();
    if (other != nullptr && lacks_scratch(*other) && !take_scratch(*other) && lacks_scratch(*other))
      waiting_for_scratch_.push_back(waiting);
  }
}

void Engine::grant_overdue_scratch() {
  const auto overdue = std::find_if(waiting_for_scratch_.begin(), waiting_for_scratch_.end(),
                                    [&](const auto& entry) {
                                      const auto call = entry.lock();
                                      return call != nullptr && lacks_scratch(*call) &&
                                             now_ - call->scratch_wanted_ns >= kOverdueNs;
                                    });
  if (overdue == waiting_for_scratch_.end()) return;
  const auto call = overdue->lock();
  call->scratch_wanted_ns = now_;
  most_overdrawn_ = n_overdrawn_ + 1;
  if (take_scratch(*call))
    std::erase_if(waiting_for_scratch_, [&](const auto& entry) { return entry.lock() == call; });
}

// A group that this process has not made, or not yet.
Group& Engine::unborn(uint64_t id) {
  auto& slot = groups_[id];
  slot = std::make_shared<Group>();
  slot->id = id;
  return *slot;
}

// A group that this process has yet to make has ended, a peer says, which may not even be in it.
void Engine::end_unborn(int peer, uint64_t id, const Error& why) {
  Group* group = groups_.count(id) != 0 ? groups_[id].get() : nullptr;
  const auto by_peer = [&](const auto& told) { return told.first == peer; };
  if (group != nullptr && std::any_of(group->told.begin(), group->told.end(), by_peer)) return;
  if (n_ended_unborn_[peer] == kMostEndedUnborn)
    return protocol_error(peer, "ended more than " + std::to_string(kMostEndedUnborn) +
                                    " groups that this rank has never made");
  n_ended_unborn_[peer]++;
  (group != nullptr ? *group : unborn(id)).told.emplace_back(peer, why);
}

void Engine::forget(Group& group) {
  const uint64_t id = group.id;
  if (dropped_groups_.insert(id).second) dropped_order_.push_back(id);
  if (dropped_order_.size() > kMostDropped) {
    dropped_groups_.erase(dropped_order_.front());
    dropped_order_.pop_front();
  }
  groups_.erase(id);
}

// Promises staging for segments from `upto` on. Together they must cover rate times delay, which
// nobody knows: where everything that was promised is here before more was, the sender has stood
// still for want of it, and the peer's flows get twice as much.
void Engine::look_ahead(Collective& call, uint32_t at, uint32_t upto) {
  StepState& state = call.state[at];
  uint32_t& ahead = look_ahead_[call.group->members[call.plan->program->steps[at].peer]];
  const bool starved = state.reserved > 0 && state.done + state.arrived.size() >= state.grant_said;
  if (starved && state.reserved >= ahead) ahead = std::min(2 * ahead, kMostLookAhead);
  for (uint32_t wish = std::min(ahead, state.n_segments - upto); wish > state.reserved; wish /= 2) {
    if (!staging_.reserve((wish - state.reserved) * call.as_encoded(at, call.plan->segment_bytes)))
      continue;
    state.reserved = wish;
    return;
  }
  if (state.reserved == 0)
    traffic_[call.group->members[call.plan->program->steps[at].peer]].no_staging++;
}

}  // namespace shoal
