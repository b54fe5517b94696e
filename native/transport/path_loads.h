// Of several paths to a peer, which one brings a frame soonest.
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

// Paths of one number share a NIC, whatever peer they lead to. So what each of them has yet to
// carry is counted for all links together, and how fast it does so: by what was confirmed while
// something was not. A path that took all it could hold would keep the others idle where little is
// sent ahead; one that took as many bytes as a faster one would hold up what is acknowledged in
// order.
//
// The clock is passed in. Threads: one at a time, under the channel's lock.
class PathLoads {
 public:
  // Of such time a rate is measured. Less sees single bursts, more is late to see that a NIC has
  // become slow.
  static constexpr int64_t kWindowNs = 20 * kMillisecond;
  // What is confirmed in so long a time in which nobody looked says nothing. Less would leave a
  // busy machine without rates.
  static constexpr int64_t kUnseenNs = 100 * kMillisecond;
  // Of a path that has no more on its way nothing is measured: that takes the way there and back,
  // whatever the path carries.
  static constexpr size_t kAloneBytes = 64u << 10;
  // A rate counts twice as much after each such time in which it was not measured, as far as the
  // fastest path's: what was too slow to be used is tried again, and more so with time.
  static constexpr int64_t kDoubledNs = 250 * kMillisecond;
  // The next measurement is not added to an older one but takes its place.
  static constexpr int64_t kOldNs = kSecond;
  // Kernels are asked no more often: a microsecond for six connections with something on its way.
  static constexpr int64_t kLookNs = kMillisecond;

  // Asks the pipes of all shares what was confirmed, unless they were asked a moment ago.
  void look(int64_t now);
  // When so many bytes more will have left by a path; compare with others of the same moment. A
  // path whose rate nobody knows counts as fast as the fastest.
  double due(size_t path, size_t n_bytes, int64_t now) const;

 private:
  friend class PathShare;
  struct Load {
    size_t n_bytes = 0;
    bool is_flowing = false;  // enough was left when some was confirmed the last time
    int64_t since_ns = 0;     // then
    int64_t busy_ns = 0;      // while it was flowing, since it was measured
    size_t n_confirmed = 0;   // meanwhile
    double rate = 0;          // bytes per ns; 0: nobody knows
    int64_t measured_ns = 0;
  };
  void add(size_t path, size_t n_bytes);
  void confirm(size_t path, size_t n_bytes, int64_t now);
  void drop(size_t path, size_t n_bytes);

  std::array<Load, Header::kMaxPaths> loads_{};
  std::vector<PathShare*> shares_;
  int64_t looked_ns_ = 0;
};

// What one path of one link has of them, while it lives.
//
// Threads: as the loads, which outlive it; so does the pipe.
class PathShare {
 public:
  // Nothing of it counts where nothing was confirmed for so long: a peer that is stopped would hold
  // up what the NIC carries to others.
  static constexpr int64_t kStandsStillNs = 100 * kMillisecond;

  PathShare(PathLoads& loads, size_t path, const Pipe& pipe);
  ~PathShare();
  PathShare(const PathShare&) = delete;

  // Small data counts only behind bulk data: alone it takes a round trip, whatever a path carries.
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
  size_t n_counted_ = 0;                                    // of what is not confirmed
  int64_t moved_ns_ = 0;  // when some was confirmed, or it had none before
};

}  // namespace shoal
