// The keys of messages: both ends count them, and derive the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace shoal {

// The two upper bits part messages from the keys that src/shoal/group/calls.py makes.
inline constexpr uint64_t kMessage = uint64_t{3} << 62;
inline constexpr uint64_t kUnmatched = uint64_t{2} << 62;  // in flight without a message; not sent

inline bool is_message(uint64_t key) { return (key & kMessage) == kMessage; }

// How many messages of each tag have gone from one rank of a group to another. No tag is ever
// forgotten: the other rank may still count.
//
// Threads: under the channel's lock.
class MessageCounts {
 public:
  // The key of the message after those that were called for.
  uint64_t next(int from, int to, int64_t tag) const;
  uint64_t take(int from, int to, int64_t tag);
  // Whether this may be counted where at most so many may be.
  bool may_take(int from, int to, int64_t tag, size_t most) const;

 private:
  std::unordered_map<uint64_t, uint64_t> n_messages_;  // by the pair of ranks and the tag
};

}  // namespace shoal
