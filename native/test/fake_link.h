// An in-process medium between any number of ranks: it gives tests every fault of a network, from a
// seed.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/shared_memory.h"
#include "test/fake_pipe.h"
#include "transport/header_seal.h"
#include "transport/link.h"
#include "transport/slots.h"

namespace shoal::test {

// Repeatable on every platform, unlike the distributions of <random>.
class FakeRandom {
 public:
  explicit FakeRandom(uint64_t seed) : state_(seed) {}

  uint64_t next();
  uint64_t below(uint64_t n) { return n == 0 ? 0 : next() % n; }
  bool chance(double probability) { return (next() >> 11) * 0x1p-53 < probability; }

 private:
  uint64_t state_;
};

class FakeLink;

// Threads: one. Must outlive its links.
class FakeNet {
 public:
  // Chances are per frame, from 0 to 1. With all of them 0, frames arrive whole, in order and at
  // the next pump.
  struct Options {
    uint64_t seed = 1;
    uint64_t epoch = 1;
    Bytes job_key = std::as_bytes(std::span("the key of the net"));
    size_t max_inline = 1024;
    size_t copied = 256;         // payloads up to this are copied by send(), larger ones borrowed
    size_t room = 0;             // frames on the wire each way before senders queue; 0: no bound
    bool shares_memory = false;  // as in a host: no receive buffer, put, by reference and slots
    int n_hosts = 1;             // hosts share memory: rank r is on host r % n_hosts

    double delays = 0;  // arrives up to longest_delay steps later, and so do the frames behind it
    uint64_t longest_delay = 8;
    double reorders = 0;       // overtakes frames sent before it (never a goodbye)
    double splits = 0;         // arrives in pieces, over several pumps
    double reads_late = 0;     // the sender's memory is read only when the frame is delivered
    double reports_late = 0;   // sent() runs some steps after the memory was read
    double corrupts = 0;       // one bit flips on the wire
    double cuts = 0;           // the connection breaks instead
    uint64_t cuts_at = 0;      // the connection that takes the n-th frame in total breaks instead
    double refuses_share = 0;  // share() answers "not now"
    // Per put or get: it completes up to longest_delay steps later, and others before it. Its bytes
    // move at once or only then.
    double moves_late = 0;
    double releases_late = 0;  // release() takes effect some steps later

    // Not 0: links are TcpLinks over this many byte streams each. Then delays, splits and corrupts
    // are per write and read.
    uint32_t n_paths = 0;
    double path_cuts = 0;   // per write: the path breaks, if another lives
    double path_mutes = 0;  // per write: bytes on the path are lost without any report
    // Not 0: each lost path is made again after at most this many steps, at separate times for each
    // end; then the last path may break too.
    uint64_t longest_remake = 0;
    int64_t resume_ns = 10 * kSecond;
    // With longest_remake: links start without paths, and get them this late after their first use.
    bool begins_unlinked = false;
  };

  FakeNet(int n_ranks, const Options& options);
  ~FakeNet();

  // `rank`'s end of the connection with `peer`; at most one at a time.
  std::unique_ptr<Link> link(int rank, int peer);
  // The slots of `rank` and their stamps, which its peers read.
  void set_arena(int rank, std::byte* slots, std::span<std::atomic<uint64_t>> stamps) {
    arenas_[static_cast<size_t>(rank)] = {slots, stamps};
  }

  int host_of(int rank) const { return options.shares_memory ? rank % options.n_hosts : rank; }
  void step() {
    ++now_;
    paths_.step();
  }
  void cut(int a, int b);  // both ends break at their next pump
  void cut_path(int a, int b, uint32_t path) { paths_.cut(a, b, path); }
  void mute_path(int a, int b, uint32_t path) { paths_.mute(a, b, path); }
  // No frame is on any wire, in any queue or half received.
  bool is_idle() const;

  uint64_t n_delivered_to(int rank) const { return n_delivered_[static_cast<size_t>(rank)]; }
  uint64_t n_corrupted() const { return n_corrupted_; }
  uint64_t n_paths_cut() const { return paths_.n_cut(); }
  uint64_t n_path_reconnects() const { return paths_.n_reconnects(); }
  uint64_t n_sent() const { return n_sent_; }  // frames sent by all ranks
  // The first breach of link.h's contract by a user of the links; empty if there was none.
  const std::string& violation() const { return violation_; }

  Options options;  // may be changed at any time

  // A liar at `from`: changes a frame before it is sealed, so that its checksums are valid.
  std::function<void(int from, Header& header, std::vector<std::byte>& payload)> tamper;

 private:
  friend class FakeLink;
  friend class FakePipe;
  friend class FakePaths;
  struct Parcel {
    Header header;
    std::vector<std::byte> own;           // the payload, after it was read
    const std::byte* borrowed = nullptr;  // the payload, until it is read
    bool is_lent_by_call = false;
    uint64_t token = 0;
    uint64_t due = 0;
    bool overtakes = false, splits = false, damaged = false;
  };
  struct Wire {  // one direction
    std::deque<Parcel> parcels;
    bool ended = false;  // the sender closed: the receiver breaks once it has read the rest
    bool cut = false;
  };

  Wire& wire(int from, int to) { return wires_[static_cast<size_t>(from * n_ranks_ + to)]; }
  void accuse(const std::string& what);

  void seal(Header& header, const std::byte* payload, size_t n_bytes) const;

  const int n_ranks_;
  const HeaderSeal seal_;  // of all frames without a path
  FakeRandom random_;
  uint64_t now_ = 0;
  uint64_t n_corrupted_ = 0;
  uint64_t n_sent_ = 0;
  std::vector<uint64_t> n_delivered_;  // by receiver
  std::string violation_;
  std::vector<Wire> wires_;
  std::vector<FakeLink*> links_;
  FakePaths paths_;
  struct Arena {
    std::byte* slots = nullptr;
    std::span<std::atomic<uint64_t>> stamps;
  };
  std::vector<Arena> arenas_;
};

class FakeLink final : public Link {
 public:
  FakeLink(FakeNet& net, int rank, int peer);
  ~FakeLink() override;

  bool send(const Frame& frame) override;
  bool flush(FrameSink& sink) override;
  bool pump(FrameSink& sink) override;
  bool has_queued() const override { return !queue_.empty(); }
  bool release(uint64_t token, const CallId& call) override;
  void close() override;
  size_t max_inline() const override { return net_.options.max_inline; }
  const char* kind() const override { return "fake"; }
  bool shares_memory() const override { return net_.host_of(rank_) == net_.host_of(peer_); }
  bool share(uint32_t region) override;
  Moved put(uint64_t token, const CallId& call, const std::byte* from, size_t n_bytes,
            const Remote& to) override;
  Moved get(uint64_t token, const CallId& call, const Remote& from, const Into& into) override;

 private:
  friend class FakeNet;
  using Parcel = FakeNet::Parcel;
  struct Report {
    uint64_t token, due;
  };
  struct Move {
    uint64_t token, due;
    CallId call;
    std::function<Moved()> run;
  };
  struct Release {
    uint64_t token, due;
    CallId call;
  };

  FakeNet::Wire& out() { return net_.wire(rank_, peer_); }
  FakeNet::Wire& in() { return net_.wire(peer_, rank_); }
  uint64_t late(double chance);
  std::byte* address_of(const Remote& there, size_t n_bytes);
  Moved begin_move(Move move);
  bool finish_moves(FrameSink& sink);
  bool finish_releases(FrameSink& sink);
  void let_go(const CallId& call);
  void put_on_wire(Parcel parcel);
  void read(Parcel& parcel);
  void damage(Parcel& parcel);
  bool report(FrameSink& sink);
  bool deliver(FrameSink& sink);
  Parcel take(size_t at);
  size_t next_due();
  bool begin(FrameSink& sink);
  bool land(FrameSink& sink);
  void end(FrameSink& sink);
  bool is_intact(const Parcel& parcel, std::span<const std::byte> payload);
  void fail(FrameSink& sink, const std::string& what, bool of_path = false);

  FakeNet& net_;
  const int rank_, peer_;
  bool closed_ = false;
  std::deque<Parcel> queue_;
  std::deque<Report> reports_;
  std::deque<Move> moves_;
  std::deque<Release> releases_;
  std::set<uint32_t> shared_;
  std::map<uint32_t, Mapping> regions_;  // the peer's

  bool receiving_now_ = false;
  Parcel current_;
  std::span<std::byte> receive_buffer_;
  size_t n_landed_ = 0;
  std::vector<std::byte> diverted_;
};

}  // namespace shoal::test
