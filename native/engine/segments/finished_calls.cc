#include "engine/segments/finished_calls.h"

#include <algorithm>
#include <utility>

namespace shoal {
namespace {

constexpr size_t kChunksKept = 1 << 20;  // of them: 16 MiB of layouts

}  // namespace

void FinishedCalls::launched(uint64_t key) {
  if (is_counted(key)) last_counted_ = std::max(last_counted_, key);
}

void FinishedCalls::remember(uint64_t key, std::shared_ptr<const Plan> plan, Subject subject) {
  Past& kept = past_[key];
  if (kept.plan == nullptr)
    order_.push_back(key);
  else
    n_chunks_ -= kept.plan->n_chunks();
  kept = {std::move(plan), subject};
  n_chunks_ += kept.plan->n_chunks();
  while (order_.size() > kKept || n_chunks_ > kChunksKept) {
    const auto oldest = past_.find(order_.front());
    order_.pop_front();
    n_chunks_ -= oldest->second.plan->n_chunks();
    past_.erase(oldest);
  }
}

FinishedCalls::Past FinishedCalls::past(uint64_t key) const {
  const auto found = past_.find(key);
  return found == past_.end() ? Past{} : found->second;
}

bool FinishedCalls::is_forgotten(uint64_t key) const {
  // Keys just below the last may still be unused: another thread may be about to post one.
  return is_counted(key) && key + kKept < last_counted_;
}

}  // namespace shoal
