// The streams of the seeded network: TcpLink runs over them as over sockets.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>

#include "transport/path_link.h"
#include "transport/pipe.h"

namespace shoal::test {

class FakeNet;

// One direction of one path between two ranks, as a kernel holds it.
struct FakeStream {
  std::deque<std::byte> bytes;
  bool is_ended = false;  // no more is written
  bool is_cut = false;    // no more can be written; the rest can be read before the end is reported
  bool is_unread = false;  // the reader is gone
  // From this step on bytes in flight are lost without any report; 0: never.
  uint64_t mute_at = 0;
  bool has_swallowed = false;
};

// Both directions of one connection, by writer: the lower rank, or the higher one.
using FakeStreams = std::array<FakeStream, 2>;

class FakePipe final : public Pipe {
 public:
  FakePipe(FakeNet& net, int rank, int peer, uint32_t path, std::shared_ptr<FakeStreams> streams);
  ~FakePipe() override;

  ssize_t write(const iovec* vectors, size_t n_vectors) override;
  ssize_t read(const iovec* vectors, size_t n_vectors) override;
  void end(bool both) override;
  Silence silence() override;

 private:
  FakeStream& out() { return (*streams_)[rank_ < peer_ ? 0 : 1]; }
  FakeStream& in() { return (*streams_)[rank_ < peer_ ? 1 : 0]; }

  FakeNet& net_;
  const int rank_, peer_;
  const uint32_t path_;
  const std::shared_ptr<FakeStreams> streams_;  // of this connection: paths are made again
};

// The paths of the network, and the maker that replaces lost ones.
class FakePaths {
 public:
  explicit FakePaths(FakeNet& net, int n_ranks);
  ~FakePaths();

  std::unique_ptr<Link> link(int rank, int peer);
  void cut(int a, int b, uint32_t path);
  void mute(int a, int b, uint32_t path);
  size_t n_living(int a, int b) const;
  bool is_idle() const;
  void step();
  uint64_t n_cut() const { return n_cut_; }
  uint64_t n_reconnects() const { return n_reconnects_; }

 private:
  struct End;
  // The news for a rank's links, with its times.
  struct Arrival {
    uint64_t due;
    int rank, peer;
    uint32_t path;
    std::shared_ptr<FakeStreams> streams;
    bool is_first;  // of the two ends
  };
  size_t index(int rank, int peer) const { return static_cast<size_t>(rank * n_ranks_ + peer); }
  std::shared_ptr<FakeStreams>& streams(int a, int b, uint32_t path);
  const FakeStreams* find(int a, int b, uint32_t path) const;
  void want(int rank, int peer, uint32_t path);
  void arrive(Arrival arrival);

  FakeNet& net_;
  const int n_ranks_;
  std::vector<std::shared_ptr<FakeStreams>> streams_;  // by lower rank, higher rank and path
  std::vector<std::unique_ptr<End>> ends_;             // by rank
  std::vector<PathLink*> links_;  // by rank and peer; the links that want paths
  std::vector<bool> in_making_;   // indexed as streams_
  std::deque<Arrival> arrivals_;
  uint64_t n_cut_ = 0, n_reconnects_ = 0;
};

}  // namespace shoal::test
