#include "engine/segments/scratch.h"

#include <algorithm>
#include <new>
#include <utility>

namespace shoal {
namespace {

// Scratch below this size is given at once.
constexpr uint64_t kSmall = 64u << 10;
// The call that has been the first to wait for this long gets scratch beyond the ceiling, and after
// a pause the next. Otherwise ranks that start many calls in different orders could deadlock. NOT
// every call that has waited for this long: on busy cores that are all, although others end.
constexpr int64_t kOverdueNs = 5'000'000'000;
constexpr int64_t kPauseNs = 1'000'000'000;

// Another step of the call may have taken scratch meanwhile, or its group may have run out of
// memory.
bool lacks_scratch(const Call& call) { return !call.ended && call.scratch.memory == nullptr; }

}  // namespace

bool Scratch::take(Call& call, uint32_t at) {
  if (give(call)) return true;
  if (call.ended) return false;  // the allocation failed
  auto& steps = call.scratch.wanted_by;
  if (steps.empty()) waiting_.push_back(call.weak_from_this());
  if (std::find(steps.begin(), steps.end(), at) == steps.end()) steps.push_back(at);
  if (call.scratch.wanted_ns < 0) call.scratch.wanted_ns = now_;
  return false;
}

bool Scratch::give(Call& call) {
  const uint64_t n_bytes = call.scratch_share();
  if (n_bytes > kSmall && !staging_.reserve(n_bytes)) {
    if (n_overdrawn_ >= most_overdrawn_) return false;
    call.scratch.overdraws = true;
    n_overdrawn_++;
  }
  call.scratch.memory = call.new_scratch();
  if (call.scratch.memory == nullptr) {
    if (n_bytes > kSmall && !call.scratch.overdraws) staging_.unreserve(n_bytes);
    judge_.abort_group(*call.group,
                       {Fault::kResource, rank_,
                        judge_.who(rank_) + " has no " + std::to_string(n_bytes) +
                            " B of memory left for " + call.doing()},
                       true);
    return false;
  }
  n_bytes_ += n_bytes;
  call.memory[kScratch] = {call.scratch.memory.get()};
  for (const uint32_t at : std::exchange(call.scratch.wanted_by, {})) steps_.make_ready(call, at);
  return true;
}

bool Scratch::give_back(Call& call) {
  if (call.scratch.memory == nullptr) return false;
  const uint64_t n_bytes = call.scratch_share();
  call.scratch.memory.reset();
  call.memory[kScratch].clear();
  n_bytes_ -= n_bytes;
  if (std::exchange(call.scratch.overdraws, false)) {
    if (--n_overdrawn_ == 0) most_overdrawn_ = 1;
  } else if (n_bytes > kSmall) {
    staging_.unreserve(n_bytes);
  }
  return true;
}

void Scratch::pass_on() {
  if (waiting_.empty()) return;
  for (const auto& waiting : std::exchange(waiting_, {})) {
    const auto other = waiting.lock();
    if (other != nullptr && lacks_scratch(*other) && !give(*other) && lacks_scratch(*other))
      waiting_.push_back(waiting);
  }
}

void Scratch::grant_overdue() {
  std::erase_if(waiting_, [](const auto& entry) {
    const auto call = entry.lock();
    return call == nullptr || !lacks_scratch(*call);
  });
  if (waiting_.empty()) return;
  const auto call = waiting_.front().lock();
  if (first_.lock() != call) {
    first_ = call;
    overdue_ns_ = now_ + kOverdueNs;
  }
  if (now_ < overdue_ns_) return;
  most_overdrawn_ = n_overdrawn_ + 1;
  if (give(*call)) waiting_.pop_front();
  if (!waiting_.empty()) first_ = waiting_.front();
  overdue_ns_ = now_ + kPauseNs;
}

}  // namespace shoal
