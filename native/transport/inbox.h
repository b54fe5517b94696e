// Records which frames of a link over paths have arrived, to drop repeats and acknowledge.
#pragma once

#include <array>

#include "transport/outbox.h"

namespace shoal {

// Threads: one at a time, under the channel's lock.
class Inbox {
 public:
  explicit Inbox(uint64_t n_before = 0) : floor_(n_before) {}

  enum class Verdict : uint8_t { kNew, kAgain, kBeyond };

  // kBeyond: so far ahead that no honest peer has sent it.
  Verdict judge(uint32_t sequence) const {
    const uint32_t ahead = sequence - static_cast<uint32_t>(floor_);
    if (static_cast<int32_t>(ahead) <= 0) return Verdict::kAgain;
    if (ahead > kSeen) return Verdict::kBeyond;
    return seen_[sequence % kSeen] ? Verdict::kAgain : Verdict::kNew;
  }

  // A new frame has arrived whole.
  void take(uint32_t sequence) {
    seen_[sequence % kSeen] = true;
    while (seen_[(floor_ + 1) % kSeen]) seen_[++floor_ % kSeen] = false;
  }

  uint64_t floor() const { return floor_; }  // all frames up to this one have arrived

 private:
  static constexpr uint32_t kSeen = 2 * Outbox::kWindow;  // closing frames go beyond the window

  uint64_t floor_;  // whose lower half the wire carries
  std::array<bool, kSeen> seen_{};
};

}  // namespace shoal
