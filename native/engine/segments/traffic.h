// Counters of the traffic with each peer and of the reasons why sends waited, for people who look
// for the cause of a slow or stuck call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace shoal {

// Count that an attempt could not continue; returns 0, the bytes that it moved.
inline size_t stalled(uint64_t& how_often) {
  how_often++;
  return 0;
}

// Threads: under the channel's lock.
class Traffic {
 public:
  struct Peer {
    uint64_t n_frames_out = 0, n_frames_in = 0;
    uint64_t n_bytes_out = 0, n_bytes_in = 0;  // of data as encoded, moved by any way
    uint64_t slot_bytes_out = 0;               // of those, bytes copied into a slot
    // How often a step was stopped only by the lack of this.
    uint64_t no_grant = 0, no_slot = 0, no_credit = 0, no_staging = 0;
  };

  explicit Traffic(size_t n_peers) : peers_(n_peers) {}

  Peer& operator[](int peer) {
    auto& kept = peers_[static_cast<size_t>(peer)];
    if (kept == nullptr) kept = std::make_unique<Kept>();
    return kept->now;
  }
  const Peer& operator[](int peer) const { return kept_of(peer).now; }

  // Keep the counts of one and two seconds ago, from which rates follow.
  void sample(int64_t now_ns) {
    if (now_ns - newer_ns_ < kSampleNs) return;
    older_ns_ = newer_ns_;
    newer_ns_ = now_ns;
    for (const auto& kept : peers_) {
      if (kept == nullptr) continue;
      kept->older = kept->newer;
      kept->newer = {kept->now.n_bytes_out, kept->now.n_bytes_in};
    }
  }

  // Bytes per second over the last one to two seconds.
  struct Rates {
    double out = 0, in = 0;
  };
  Rates rates(int peer, int64_t now_ns) const {
    const double seconds = static_cast<double>(now_ns - older_ns_) / 1e9;
    if (older_ns_ == 0 || seconds <= 0) return {};
    const Peer& now = (*this)[peer];
    const Count& then = kept_of(peer).older;
    return {static_cast<double>(now.n_bytes_out - then.out) / seconds,
            static_cast<double>(now.n_bytes_in - then.in) / seconds};
  }

 private:
  struct Count {
    uint64_t out = 0, in = 0;
  };
  static constexpr int64_t kSampleNs = 1'000'000'000;
  struct Kept {
    Peer now;
    Count newer, older;
  };
  const Kept& kept_of(int peer) const {
    static const Kept nothing;
    const auto& kept = peers_[static_cast<size_t>(peer)];
    return kept != nullptr ? *kept : nothing;
  }

  std::vector<std::unique_ptr<Kept>> peers_;  // null until the first frame to or from a peer
  int64_t newer_ns_ = 0, older_ns_ = 0;
};

}  // namespace shoal
