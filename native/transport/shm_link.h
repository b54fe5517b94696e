// Frames through shared memory to a process of the same host.
#pragma once

#include <deque>
#include <map>
#include <set>

#include "transport/arena.h"
#include "transport/link.h"
#include "transport/transport.h"

namespace shoal {

// Small payloads travel in the ring; larger ones lie in slots or shared regions and are named by
// place. The Unix socket carries regions' descriptors, and its end tells of the peer's death.
//
// Buffers: `own` outlives the link.
class ShmLink final : public Link {
 public:
  // Owns `socket_fd`, `memory_fd` and `event_fd`. `own_local` and `peer_local` are positions among
  // the ranks of this host.
  ShmLink(int peer, const Arena& own, int own_local, int peer_local, int socket_fd, int event_fd,
          uint64_t epoch);
  ~ShmLink() override;
  Error open(int memory_fd, int n_local);

  // See Transport.
  static bool reaches(const PeerSockets& peer) { return peer.memory_fd >= 0; }
  static Error connect(const Site& site, const PeerSockets& peer, std::unique_ptr<Link>& out);

  bool send(const Frame& frame) override;
  bool flush(FrameSink& sink) override;
  bool pump(FrameSink& sink) override;
  bool has_queued() const override { return !queue_.empty(); }
  LinkState state() const override;
  bool release(uint64_t token, const std::byte* from, size_t n_bytes) override;
  void close() override;
  void forsake() override;
  size_t max_inline() const override { return Arena::kMaxInline; }
  bool shares_memory() const override { return true; }
  bool share(uint32_t region) override;
  // Done when they return: this thread copies, or folds straight from the peer's pages.
  Moved put(uint64_t token, const std::byte* from, size_t n_bytes, const Remote& to) override;
  Moved get(uint64_t token, const Remote& from, const Into& into) override;

  const char* kind() const override { return "shm"; }
  std::vector<int> fds() const override { return {socket_fd_}; }
  // The socket has notes: takes descriptors, notices the end.
  bool on_event(FrameSink& sink, bool ended) override;
  bool rings_bell() const override { return true; }
  bool has_inbound() const override {
    return !closed_ && inbound_->head.load(std::memory_order_acquire) !=
                           inbound_->tail.load(std::memory_order_relaxed);
  }
  int64_t tick() override {
    release_regions();
    return theirs_.header().heartbeat_ns.load();
  }

 private:
  bool push(const Frame& frame);
  bool find_room(size_t size);
  void ring_bell();
  bool deliver(FrameSink& sink);
  bool tell(FrameType type, const Place& place, int fd);
  enum class Notes { kNone, kTaken, kEnded, kCorrupt };
  Notes take_notes();
  void take_region(const Place& place, int fd);
  std::byte* address_of(const Remote& there, size_t n_bytes);
  void release_regions();  // tells the peer to unmap those that are gone
  void fail(FrameSink& sink, const std::string& what, bool of_path = false);

  const int peer_;
  const int own_local_;
  RingHeader* inbound_;
  const std::byte* inbound_data_;
  Arena theirs_;
  int socket_fd_, event_fd_;
  const uint64_t epoch_;

  std::deque<Frame> queue_;
  bool closed_ = false;
  uint64_t head_ = 0;      // of the ring, which the peer could write to
  uint32_t n_pushed_ = 0;  // frames that the peer was not told of
  uint64_t n_full_ = 0;    // how often there was no room for a frame
  Ring how_ = Ring::kCounted;
  std::set<uint32_t> shared_;
  std::map<uint32_t, Mapping> regions_;  // the peer's
};

}  // namespace shoal
