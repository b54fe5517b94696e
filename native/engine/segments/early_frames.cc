#include "engine/segments/early_frames.h"

#include <string>
#include <utility>

namespace shoal {
namespace {

constexpr uint32_t kMost = 1u << 16;  // per peer; a call costs a peer a handful

}  // namespace

bool EarlyFrames::keep(Group& group, int peer, const Header& header, std::span<std::byte> payload) {
  // A kDisagree frame answers a call made here, so this one is about a call that is forgotten.
  if (group.life.has_ended() || header.type == FrameType::kDisagree ||
      group.finished.is_forgotten(header.key)) {
    ways_.discard(peer, header, payload);
    return false;
  }
  if (header.type == FrameType::kData && (header.flags & kEager) == 0) {
    judge_.protocol_error(peer, "sent " + std::to_string(payload.size()) +
                                    " B for a call that this rank has not posted");
    return false;
  }
  if (n_kept(peer) == kMost) {
    judge_.protocol_error(peer,
                          "is more than " + std::to_string(kMost) + " frames ahead of this rank");
    return false;
  }
  n_kept_[static_cast<size_t>(peer)]++;
  group.early[header.key].push_back(
      {peer, header, {payload.begin(), payload.end()}, ++group.n_early});
  ways_.frames.drop_receive_buffer(peer, header);
  return true;
}

std::vector<Early> EarlyFrames::take(Group& group, uint64_t key) {
  const auto found = group.early.find(key);
  if (found == group.early.end()) return {};
  std::vector<Early> frames = std::move(found->second);
  group.early.erase(found);
  return frames;
}

void EarlyFrames::used(Early& frame) {
  n_kept_[static_cast<size_t>(std::exchange(frame.peer, -1))]--;
}

void EarlyFrames::discard(std::vector<Early> frames) {
  for (const Early& frame : frames) {
    if (frame.peer < 0) continue;  // used already
    n_kept_[static_cast<size_t>(frame.peer)]--;
    ways_.discard(frame.peer, frame.header, frame.payload);
  }
}

}  // namespace shoal
