#include "engine/segments/credits.h"

#include <algorithm>
#include <utility>

namespace shoal {
namespace {

constexpr uint32_t kMostBytes = 1u << 20;  // per peer, whatever its ceiling allows it

}  // namespace

Credits::Credits(Links& links, size_t n_peers, size_t staging_bytes)
    : links_(links),
      n_others_(std::max<size_t>(1, n_peers - 1)),
      allowance_(
          static_cast<uint32_t>(std::min<size_t>(kMostBytes, staging_bytes / 4 / n_others_))),
      out_(n_peers, 0),
      in_(n_peers, 0),
      due_(n_peers, 0) {}

bool Credits::may_send(int peer, size_t n_bytes) const {
  return out_[static_cast<size_t>(peer)] + cost(n_bytes) <= allowance_;
}

void Credits::sent(int peer, size_t n_bytes) { out_[static_cast<size_t>(peer)] += cost(n_bytes); }

void Credits::came_back(int peer, uint64_t n_bytes) {
  uint32_t& out = out_[static_cast<size_t>(peer)];
  out -= static_cast<uint32_t>(std::min<uint64_t>(n_bytes, out));
}

bool Credits::came(int peer, size_t n_bytes) {
  return (in_[static_cast<size_t>(peer)] += cost(n_bytes)) <= kMostBytes;
}

void Credits::used(int peer, size_t n_bytes) {
  uint32_t& due = due_[static_cast<size_t>(peer)];
  due += cost(n_bytes);
  if (due < allowance_ / 2) return;
  Frame frame;
  frame.header.type = FrameType::kCredit;
  frame.carry({0, Place::kNoFlow, due});
  in_[static_cast<size_t>(peer)] -= std::exchange(due, 0);
  links_.send(peer, frame);
}

}  // namespace shoal
