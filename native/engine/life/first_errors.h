// The channels of a mesh fail a group together: the first error found by any of them is reported by
// all, word for word.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "base/error.h"

namespace shoal {

// Threads: any. Its lock is taken under a channel's, and no other is taken under it.
class FirstErrors {
 public:
  // A notice to a channel that a group has failed in another one.
  struct News {
    uint64_t group;
    Error why;
  };

  explicit FirstErrors(int n_channels) : boxes_(static_cast<size_t>(n_channels)) {}

  // `channel` fails the group for `why`, which is replaced by the group's first error. True if
  // `why` is that first error; then the other channels are notified. `at_once`: this rank decided
  // it, so they are woken now. Otherwise a peer reported it or is lost; the other channels are
  // about to learn the same from their own links, behind earlier frames, and are notified only if
  // that takes too long.
  bool report(int channel, uint64_t group, bool at_once, Error& why, int64_t now);
  int n_channels() const { return static_cast<int>(boxes_.size()); }
  // True if `channel` has a notice that cannot wait.
  bool has_news(int channel) const { return boxes_[static_cast<size_t>(channel)].is_urgent.load(); }
  std::vector<News> take(int channel, int64_t now);

  Error of(uint64_t group) const;  // empty: the group has not failed
  void forget(uint64_t group);     // the group is closed and can no longer fail

 private:
  struct Ended {
    uint64_t group;
    int64_t notify_ns;  // when to notify the channel
  };
  struct Box {
    std::vector<Ended> ended;
    std::atomic<bool> is_urgent{false};
  };
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, Error> first_;
  std::vector<Box> boxes_;  // by channel
};

}  // namespace shoal
