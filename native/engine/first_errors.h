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
  // What a channel is told. `at_once`: this rank has decided so. Else a peer has said so, or is
  // gone, and the channel's own links are about to tell the same, behind what came before.
  struct News {
    uint64_t group;
    Error why;
    bool at_once;
  };

  explicit FirstErrors(int n_channels) : boxes_(static_cast<size_t>(n_channels)) {}

  // `channel` ends the group for `why`, which becomes the first error found for that group. True if
  // that is this one: the others have news then, and are to be woken.
  bool tell(int channel, uint64_t group, bool at_once, Error& why);
  int n_channels() const { return static_cast<int>(boxes_.size()); }
  bool has_news(int channel) const { return boxes_[static_cast<size_t>(channel)].is_full.load(); }
  std::vector<News> take(int channel);

  Error of(uint64_t group) const;  // none: it has not ended
  void forget(uint64_t group);     // nobody can end it any more

 private:
  struct Box {
    std::vector<News> news;
    std::atomic<bool> is_full{false};
  };
  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, Error> first_;
  std::vector<Box> boxes_;  // by channel
};

}  // namespace shoal
