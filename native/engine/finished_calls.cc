#include "engine/finished_calls.h"

#include <algorithm>
#include <utility>

namespace shoal {
namespace {

constexpr size_t kChunksKept = 1 << 20;  // of them: 16 MiB of layouts

}  // namespace

void FinishedCalls::launched(uint64_t key) {
  if (is_counted(key)) last_counted_ = std::max(last_counted_, key);
}

void FinishedCalls::remember(uint64_t key, std::shared_ptr<const Plan> plan) {
  auto& kept = plans_[key];
  if (kept == nullptr)
    order_.push_back(key);
  else
    n_chunks_ -= kept->n_chunks();
  kept = std::move(plan);
  n_chunks_ += kept->n_chunks();
  while (order_.size() > kKept || n_chunks_ > kChunksKept) {
    const auto oldest = plans_.find(order_.front());
    order_.pop_front();
    n_chunks_ -= oldest->second->n_chunks();
    plans_.erase(oldest);
  }
}

std::shared_ptr<const Plan> FinishedCalls::plan_of(uint64_t key) const {
  const auto found = plans_.find(key);
  return found == plans_.end() ? nullptr : found->second;
}

bool FinishedCalls::is_forgotten(uint64_t key) const {
  // NOT all below the last: another thread may be about to post an earlier one.
  return is_counted(key) && key + kKept < last_counted_;
}

}  // namespace shoal
