// The keys of messages: both ends count the messages, and derive the same key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

namespace shoal {

// The two upper bits separate messages from the keys that src/shoal/group/calls.py makes.
inline constexpr uint64_t kMessage = uint64_t{3} << 62;
inline constexpr uint64_t kUnmatched = uint64_t{2} << 62;  // in flight without a message; not sent

inline bool is_message(uint64_t key) { return (key & kMessage) == kMessage; }

// The number of messages of each tag from one rank of a group to another. No tag is ever forgotten,
// because the other rank may still count.
//
// Threads: under the channel's lock.
class MessageCounts {
 public:
  // The key of the next message.
  uint64_t next(int from, int to, int64_t tag) const;
  uint64_t take(int from, int to, int64_t tag);
  // True if this tag can be counted without exceeding `most` tags.
  bool may_take(int from, int to, int64_t tag, size_t most) const;

 private:
  std::unordered_map<uint64_t, uint64_t> n_messages_;  // by the pair of ranks and the tag
};

}  // namespace shoal
