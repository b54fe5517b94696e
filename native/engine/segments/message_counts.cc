#include "engine/segments/message_counts.h"

namespace shoal {
namespace {

// One-to-one, and every bit of the result depends on all bits of `x` (splitmix64).
uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t channel_of(int from, int to, int64_t tag) {
  const uint64_t ends = uint64_t{static_cast<uint32_t>(from)} << 32 | static_cast<uint32_t>(to);
  return mixed(mixed(ends) ^ static_cast<uint64_t>(tag));
}

uint64_t key_of(uint64_t channel, uint64_t n) { return kMessage | mixed(channel ^ mixed(n)) >> 2; }

}  // namespace

uint64_t MessageCounts::next(int from, int to, int64_t tag) const {
  const uint64_t channel = channel_of(from, to, tag);
  const auto n = n_messages_.find(channel);
  return key_of(channel, n == n_messages_.end() ? 0 : n->second);
}

uint64_t MessageCounts::take(int from, int to, int64_t tag) {
  const uint64_t channel = channel_of(from, to, tag);
  return key_of(channel, n_messages_[channel]++);
}

bool MessageCounts::may_take(int from, int to, int64_t tag, size_t most) const {
  return n_messages_.size() < most ||
         (from >= 0 && n_messages_.count(channel_of(from, to, tag)) != 0);
}

}  // namespace shoal
