// What calls and peers may take: scratch under the staging ceiling, frames ahead of the others,
// groups that only others know.
#include <algorithm>
#include <new>
#include <utility>

#include "engine/engine.h"

namespace shoal {
namespace {

// Frames to a peer that has not made the calls yet; it keeps at most twice as many (frames.cc).
constexpr uint32_t kMostAhead = 1u << 15;
// Smaller scratch is not worth the wait.
constexpr uint64_t kSmallScratch = 64u << 10;
// When no scratch has changed hands for this long, one more call gets some, whatever the ceiling:
// ranks that start many calls in different orders could wait for each other's for ever.
constexpr int64_t kOverdueNs = 5'000'000'000;
// Groups ended by one peer that this rank has yet to make. A peer would have to be ahead by as
// many.
constexpr uint32_t kMostEndedUnborn = 4096;
// Closed groups whose late frames are known to be late.
constexpr size_t kMostDropped = 1u << 16;

}  // namespace

bool Engine::has_room(const Plan& plan) const {
  const uint32_t ahead = frames_ahead_.load(std::memory_order_relaxed);
  return ahead == 0 || ahead + plan.frames_ahead <= kMostAhead;
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
  scratch_moved_ns_ = now_;
  call.memory[kScratch] = {call.scratch.get()};
  for (const auto& [waiting, at] : waiting_for_scratch_)  // others of its steps
    if (waiting.lock().get() == &call) make_ready(call, at);
  return true;
}

void Engine::give_scratch_back(Collective& call) {
  if (call.scratch == nullptr) return;
  const uint64_t n_bytes = call.plan->scratch_bytes;
  call.scratch.reset();
  call.memory[kScratch].clear();
  scratch_bytes_ -= n_bytes;
  scratch_moved_ns_ = now_;
  if (std::exchange(call.overdraws, false)) {
    if (--n_overdrawn_ == 0) most_overdrawn_ = 1;
  } else if (n_bytes > kSmallScratch) {
    staging_.unreserve(n_bytes);
  }
  for (const auto& [waiting, at] : std::exchange(waiting_for_scratch_, {}))
    if (const auto other = waiting.lock(); other != nullptr && !other->finished)
      make_ready(*other, at);
}

void Engine::grant_overdue_scratch() {
  if (waiting_for_scratch_.empty() || now_ - scratch_moved_ns_ < kOverdueNs) return;
  scratch_moved_ns_ = now_;
  most_overdrawn_ = n_overdrawn_ + 1;
  for (const auto& [waiting, at] : std::exchange(waiting_for_scratch_, {}))
    if (const auto call = waiting.lock(); call != nullptr && !call->finished) make_ready(*call, at);
}

// A group that this process has not made, or not yet.
Group& Engine::unborn(uint64_t id) {
  auto& slot = groups_[id];
  slot = std::make_shared<Group>();
  slot->id = id;
  return *slot;
}

// A group that this process has yet to make has ended: its calls shall fail too, not wait.
bool Engine::end_unborn(int peer, uint64_t id) {
  if (n_ended_unborn_[peer] == kMostEndedUnborn) {
    protocol_error(peer, "ended more than " + std::to_string(kMostEndedUnborn) +
                             " groups that this rank has never made");
    return false;
  }
  n_ended_unborn_[peer]++;
  Group& group = groups_.count(id) != 0 ? *groups_[id] : unborn(id);
  group.poisoned_by = peer;
  return true;
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

}  // namespace shoal
