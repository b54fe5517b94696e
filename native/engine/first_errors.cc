#include "engine/first_errors.h"

#include <utility>

namespace shoal {

bool FirstErrors::tell(int channel, uint64_t group, bool at_once, Error& why) {
  std::lock_guard lock(mutex_);
  const auto [known, is_first] = first_.emplace(group, why);
  if (!is_first) {
    why = known->second;
    return false;
  }
  for (size_t other = 0; other < boxes_.size(); ++other) {
    if (static_cast<int>(other) == channel) continue;
    boxes_[other].news.push_back({group, why, at_once});
    boxes_[other].is_full = true;
  }
  return true;
}

std::vector<FirstErrors::News> FirstErrors::take(int channel) {
  std::lock_guard lock(mutex_);
  Box& box = boxes_[static_cast<size_t>(channel)];
  box.is_full = false;
  return std::exchange(box.news, {});
}

Error FirstErrors::of(uint64_t group) const {
  std::lock_guard lock(mutex_);
  const auto found = first_.find(group);
  return found == first_.end() ? Error{} : found->second;
}

void FirstErrors::forget(uint64_t group) {
  std::lock_guard lock(mutex_);
  first_.erase(group);
}

}  // namespace shoal
