// Estimates which of several paths to a peer brings a frame soonest.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/clock.h"
#include "transport/frame.h"
#include "transport/pipe.h"

namespace shoal {

class PathShare;

// Paths of one number share a NIC, even to different peers. So their outstanding bytes are counted
// over all links, and so is their rate: the bytes confirmed while others were outstanding. A path
// that took all it could hold would leave the others idle when little is sent ahead. A path that
// took as many bytes as a faster one would delay frames that are acknowledged in order.
//
// The clock is passed in. Threads: one at a time, under the channel's lock.
class PathLoads {
 public:
  // The window over which a rate is measured. A shorter one sees single bursts; a longer one
  // notices late that a NIC has become slow.
  static constexpr int64_t kWindowNs = 20 * kMillisecond;
  // Confirmations after a gap this long between two looks are not counted. A shorter limit would
  // leave a busy machine without rates.
  static constexpr int64_t kUnseenNs = 100 * kMillisecond;
  // A path with no more than this outstanding is not measured: its confirmations take a round trip
  // at any rate.
  static constexpr size_t kAloneBytes = 64u << 10;
  // A rate doubles, up to the fastest path's, after each such time without a measurement: a path
  // that was too slow to be used is tried again.
  static constexpr int64_t kDoubledNs = 250 * kMillisecond;
  // A measurement replaces one that is older than this, rather than being averaged with it.
  static constexpr int64_t kOldNs = kSecond;
  // The kernel is asked no more often than this: it costs a microsecond for six busy connections.
  static constexpr int64_t kLookNs = kMillisecond;

  // Ask all pipes what was confirmed, unless they were asked less than kLookNs ago.
  void look(int64_t now);
  // The time at which `n_bytes` more will have left by a path; comparable for the same `now`. A
  // path of unknown rate counts as fast as the fastest.
  double due(size_t path, size_t n_bytes, int64_t now) const;

 private:
  friend class PathShare;
  struct Load {
    size_t n_bytes = 0;
    bool is_flowing = false;  // enough was outstanding at the last confirmation
    int64_t since_ns = 0;     // the time of that
    int64_t busy_ns = 0;      // while it was flowing, since it was measured
    size_t n_confirmed = 0;   // in that time
    double rate = 0;          // bytes per ns; 0: unknown
    int64_t measured_ns = 0;
  };
  void add(size_t path, size_t n_bytes);
  void confirm(size_t path, size_t n_bytes, int64_t now);
  void drop(size_t path, size_t n_bytes);

  std::array<Load, Header::kMaxPaths> loads_{};
  std::vector<PathShare*> shares_;
  int64_t looked_ns_ = 0;
};

// The share of one link's path in its NIC's load, while the path lives.
//
// Threads: as the loads, which outlive it; so does the pipe.
class PathShare {
 public:
  // After this long without a confirmation its bytes do not count: a stopped peer must not delay
  // the NIC's traffic to others.
  static constexpr int64_t kStandsStillNs = 100 * kMillisecond;

  PathShare(PathLoads& loads, size_t path, const Pipe& pipe);
  ~PathShare();
  PathShare(const PathShare&) = delete;

  // Small data counts only behind bulk data: alone it takes a round trip on any path.
  void took(size_t n_bytes, int64_t now, bool is_bulk);
  void wrote(size_t n_bytes);  // of these

 private:
  friend class PathLoads;
  void look(int64_t now);
  void uncount();

  PathLoads& loads_;
  const size_t path_;
  const Pipe& pipe_;
  uint64_t n_taken_ = 0, n_written_ = 0, n_confirmed_ = 0;  // bytes, ever
  size_t n_counted_ = 0;                                    // of the unconfirmed bytes
  int64_t moved_ns_ = 0;  // the last confirmation, or the last time that it had nothing outstanding
};

}  // namespace shoal
