// How the channels of a mesh end a group together: the first error that one of them finds is that
// of all, in its very words.
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
  // What a channel is told: that a group has ended in another.
  struct News {
    uint64_t group;
    Error why;
  };

  explicit FirstErrors(int n_channels) : boxes_(static_cast<size_t>(n_channels)) {}

  // `channel` ends the group for `why`, which becomes the first error found for that group. True if
  // that is this one: the others are told then. `at_once`: this rank has decided so, and they are
  // to be woken. Else a peer has said so, or is gone: their own links are about to tell the same,
  // behind what came before, and they are told only when that takes too long.
  bool tell(int channel, uint64_t group, bool at_once, Error& why, int64_t now);
  int n_channels() const { return static_cast<int>(boxes_.size()); }
  // Something that cannot wait.
  bool has_news(int channel) const { return boxes_[static_cast<size_t>(channel)].is_urgent.load(); }
  std::vector<News> take(int channel, int64_t now);

  Error of(uint64_t group) const;  // none: it has not ended
  void forget(uint64_t group);     // nobody can end it any more

 private:
  struct Ended {
    uint64_t group;
    int64_t told_ns;  // when the channel is to be told
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
