// A link through shared memory to a process on the same host.
#pragma once

#include <deque>
#include <set>

#include "transport/arena.h"
#include "transport/link.h"
#include "transport/transport.h"

namespace shoal {

// Small payloads travel in the ring; larger ones lie in slots or shared regions and are named by
// place. Descriptors of regions go to the peer's doorbell socket. The end of a link is written to
// the ring; a death is marked by the kernel in the peer's arena, which is checked ten times a
// second.
//
// Buffers: `own` outlives the link.
class ShmLink final : public Link {
 public:
  // `peer_local`: the peer's place among the ranks of this host.
  ShmLink(int peer, Arena& own, int peer_local);
  ~ShmLink() override;
  Error open();

  // See Transport.
  static bool reaches(const PeerPlace& peer) { return peer.is_local; }
  static Error connect(const Site& site, const PeerPlace& peer, std::unique_ptr<Link>& out);

  bool send(const Frame& frame) override;
  bool flush(FrameSink& sink) override;
  bool pump(FrameSink& sink) override;
  bool has_queued() const override { return !queue_.empty(); }
  LinkState state() const override;
  bool release(uint64_t token, const CallId& call) override;
  void close() override;
  size_t max_inline() const override { return Arena::max_inline(own_.n_local()); }
  bool shares_memory() const override { return true; }
  bool share(uint32_t region) override;
  // Complete when they return: the caller copies, or folds straight from the peer's pages.
  Moved put(uint64_t token, const CallId& call, const std::byte* from, size_t n_bytes,
            const Remote& to) override;
  Moved get(uint64_t token, const CallId& call, const Remote& from, const Into& into) override;

  const char* kind() const override { return "shm"; }
  bool rings_bell() const override { return true; }
  bool has_inbound() const override {
    return !closed_ && (inbound_->head.load(std::memory_order_acquire) !=
                            inbound_->tail.load(std::memory_order_relaxed) ||
                        inbound_->is_over.load(std::memory_order_acquire) != 0);
  }
  void look(FrameSink& sink, int64_t now) override;  // notices a death
  int64_t tick() override {
    release_regions();
    // A closed link whose end could not be reported, for want of memory, counts as silent.
    return closed_ ? 0 : theirs_.header().heartbeat_ns.load();
  }

 private:
  bool push(const Frame& frame);
  bool find_room(size_t size);
  void ring_bell();
  bool deliver(FrameSink& sink);
  void tell_of_room();
  bool take_record(FrameSink& sink, uint64_t upto, uint64_t& tail);
  bool send_note(FrameType type, const Place& place, int fd);
  std::byte* address_of(const Remote& there, size_t n_bytes);
  void release_regions();  // asks the peer to unmap the freed ones
  void fail(FrameSink& sink, const std::string& what, bool of_path = false);

  const int peer_;
  Arena& own_;
  const int peer_local_;
  RingHeader* inbound_;
  const std::byte* inbound_data_;
  ArenaView theirs_;

  std::deque<Frame> queue_;
  bool closed_ = true;     // until it is opened
  uint64_t head_ = 0;      // our copy of the ring's head, which the peer could overwrite
  uint32_t n_pushed_ = 0;  // frames pushed since the peer's doorbell was last rung
  uint64_t n_full_ = 0;    // how often there was no room for a frame
  Ring how_ = Ring::kCounted;
  std::set<uint32_t> shared_;
};

}  // namespace shoal
