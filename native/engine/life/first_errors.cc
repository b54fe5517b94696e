#include "engine/life/first_errors.h"

#include "base/clock.h"

namespace shoal {
namespace {

// Half of the time in which all calls have to end.
constexpr int64_t kPatienceNs = kSecond;

}  // namespace

bool FirstErrors::report(int channel, uint64_t group, bool at_once, Error& why, int64_t now) {
  std::lock_guard lock(mutex_);
  if (const auto known = first_.find(group); known != first_.end()) {
    why = known->second;
    return false;
  }
  // Reserve before the error is recorded, because this may run out of memory.
  for (Box& box : boxes_) box.ended.reserve(box.ended.size() + 1);
  first_.emplace(group, why);
  for (size_t other = 0; other < boxes_.size(); ++other) {
    if (static_cast<int>(other) == channel) continue;
    boxes_[other].ended.push_back({group, at_once ? 0 : now + kPatienceNs});
    if (at_once) boxes_[other].is_urgent = true;
  }
  return true;
}

std::vector<FirstErrors::News> FirstErrors::take(int channel, int64_t now) {
  std::lock_guard lock(mutex_);
  Box& box = boxes_[static_cast<size_t>(channel)];
  const auto is_due = [&](const Ended& one) { return one.notify_ns <= now; };
  std::vector<News> due;
  for (const Ended& one : box.ended)
    if (is_due(one)) due.push_back({one.group, first_.at(one.group)});
  std::erase_if(box.ended, is_due);
  box.is_urgent = false;
  return due;
}

Error FirstErrors::of(uint64_t group) const {
  std::lock_guard lock(mutex_);
  const auto found = first_.find(group);
  return found == first_.end() ? Error{} : found->second;
}

void FirstErrors::forget(uint64_t group) {
  std::lock_guard lock(mutex_);
  first_.erase(group);
  for (Box& box : boxes_)
    std::erase_if(box.ended, [&](const Ended& one) { return one.group == group; });
}

}  // namespace shoal
