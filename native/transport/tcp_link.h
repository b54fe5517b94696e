// A link over stream sockets (TCP; Unix stream sockets work as well), each of them one path.
#pragma once

#include <memory>
#include <vector>

#include "transport/path_link.h"
#include "transport/pipe.h"
#include "transport/transport.h"

namespace shoal {

// Owns its pipes, which are connected and authenticated: at most Header::kMaxPaths.
//
// Headers are sealed with a keyed MAC, payloads carry CRC32C: TCP's own checksum lets about one
// damaged packet in ten million through (Stone & Partridge, SIGCOMM 2000).
class TcpLink final : public PathLink {
 public:
  // Flows up to `sizes.small` are sent without a grant. A larger limit costs a late receiver
  // memory; a smaller one costs a round trip.
  TcpLink(int peer, size_t n_paths, FrameKeys keys, const Outbox::Sizes& sizes = {});
  ~TcpLink() override;

  // See Transport.
  static bool reaches(const PeerPlace& peer) { return !peer.is_local; }
  static Error connect(const Site& site, const PeerPlace& peer, std::unique_ptr<Link>& out);

  bool flush(FrameSink& sink) override;
  bool pump(FrameSink& sink) override;
  bool has_queued() const override;
  bool is_unflushed() const override { return is_unflushed_; }
  int64_t owed_ns() override;
  LinkState state() const override;
  bool lingers() override;
  void look(FrameSink& sink, int64_t now) override;
  bool add_path(size_t path, std::unique_ptr<Pipe>&& pipe, Bytes session) override;
  void close() override;
  size_t max_inline() const override { return sizes_.small; }

  const char* kind() const override { return "tcp"; }
  std::vector<int> fds() const override;  // of the paths that live
  // Bytes sent before the end can hide it for many pumps: after `ended`, drained means that the end
  // itself was read.
  bool on_event(FrameSink& sink, bool ended) override;
  bool is_drained() const override;
  bool is_watchful() const override { return paths_.size() > 1 && outbox_.n_unacknowledged() > 0; }

 private:
  struct Path {
    std::unique_ptr<Pipe> pipe;      // null: not made yet, lost, or closed
    std::vector<Outgoing*> writing;  // has room for the most that it holds
    size_t n_waiting = 0;            // bytes in it
    Outgoing acknowledgement;        // where it is not queued, `at` is not kPath
    // Set if there are several paths whose pipes report confirmations.
    std::unique_ptr<PathShare> share;
    bool is_stuck = false;  // writing failed; reading will give the reason
    bool is_cut = false;    // nothing is read or written any more; the next pump() loses it
    bool is_drained = false;
    bool is_ending = false;        // the peer sends no more by it
    std::vector<std::byte> ahead;  // bytes read beyond the request
    size_t ahead_begin = 0, ahead_end = 0;
  };

  bool flush_path(FrameSink& sink, size_t index, size_t& budget);
  bool fill(size_t index);
  bool is_soonest(size_t index);
  ssize_t write_some(Path& path, size_t& n_wanted);
  void count_written(Path& path, size_t n_bytes);
  bool acknowledge(FrameSink& sink);
  bool acknowledge_by(FrameSink& sink, size_t index);
  bool pump_path(FrameSink& sink, size_t index);
  size_t read_some(FrameSink& sink, size_t index);
  bool parse(FrameSink& sink, size_t index);
  void lose_silent_paths(FrameSink& sink);
  bool others_answer(FrameSink& sink, size_t index, const Pipe::Silence& silence);
  void close_path(size_t path) override;
  void cut_path(size_t path) override;

  const Outbox::Sizes sizes_;
  std::vector<Path> paths_;
  bool is_unflushed_ = false;
  int64_t flushed_ns_ = 0;  // with several paths: when the last flush() began
  bool has_lost_ = false;   // a path, since the last flush() began
  uint64_t n_full_ = 0;     // how often a socket took less than it was given
};

}  // namespace shoal
