// Two path makers without meshes, in one thread.
#pragma once

#include <memory>
#include <utility>

#include "test/check.h"
#include "test/cluster.h"
#include "transport/path_maker.h"
#include "transport/tcp_link.h"

namespace shoal::test {

struct NoSink final : FrameSink {
  std::span<std::byte> receive_buffer(int, const Header&) override { return {}; }
  void arrived(int, const Header&, std::span<std::byte>) override {}
  void sent(int, uint64_t) override {}
  void spoiled(int, uint64_t) override {}
  void moved(int, uint64_t, Moved) override {}
  void released(int, uint64_t) override {}
  void broken(int, const Error& error) override { CHECK_EQ(error.text, ""); }
};

// One of two ranks, with a link to the other.
struct End {
  static constexpr int64_t kResumeNs = 20 * kSecond;

  End(int rank, int listener, const Address& other) : peer(1 - rank) {
    PathMaker::Options options{Cluster::kEpoch, rank, Cluster::key(), {listener}, {}, kResumeNs};
    options.peers.push_back({peer, 2, {other}});
    CHECK(!PathMaker::create(std::move(options), maker));
    FrameKeys keys(Cluster::key(), Cluster::kEpoch, rank, peer, 0);
    link = std::make_unique<TcpLink>(peer, 2, std::move(keys));
    link->resume_by(maker->source(0));
  }
  void notify() {
    maker->notify_links(0, sink, [](int, int) { return true; });
  }

  const int peer;
  NoSink sink;
  std::unique_ptr<PathMaker> maker;
  std::unique_ptr<TcpLink> link;
};

}  // namespace shoal::test
