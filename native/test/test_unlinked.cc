// A link that begins without a path: its requests, their times, and its deadlines.
#include <set>

#include "test/links.h"

namespace shoal::test {
namespace {

// Records a link's requests.
struct Asked final : PathSource {
  int64_t resume_ns() const override { return how_long_ns; }
  void attached(int, PathLink&) override {}
  void want(int, size_t path) override { paths.insert(path); }
  void ended(int) override { has_ended = true; }
  std::string last_failure(int) const override { return "Connection timed out"; }

  std::set<size_t> paths;
  bool has_ended = false;
  int64_t how_long_ns = 10 * kSecond;
};

// Rank 0's end of a link with rank 1 over two paths, which the test makes by hand.
struct Unlinked {
  Unlinked() : link(1, 2, keys_of(0, 1)) {
    sink.expected_peer = 1;
    link.resume_by(asked);
  }
  ~Unlinked() { link.close(); }
  void send(FrameType type) {
    Frame frame;
    frame.header.type = type;
    link.send(frame);
    link.flush(sink);
  }
  void look(int64_t from, int64_t until) {
    for (int64_t now = from; now < until && !sink.is_over; now += 100 * kMillisecond)
      link.look(sink, now);
  }
  std::string states() const {
    std::string all;
    for (const PathState& path : link.state().paths)
      all += "udole"[static_cast<size_t>(path.is)];  // the first letters, but for lost and ended
    return all;
  }

  Asked asked;
  TcpLink link;
  Recorder sink;
};

TEST("an unused link requests no path, sends no heartbeat, and waits for ever") {
  Unlinked one;
  one.send(FrameType::kHeartbeat);
  one.look(kSecond, 3600 * kSecond);
  CHECK(one.link.is_unlinked());
  CHECK(!one.link.is_suspended());
  CHECK(!one.link.has_queued());
  CHECK(one.asked.paths.empty());
  CHECK(!one.sink.is_over);
  CHECK_EQ(one.states(), "uu");
}

TEST("the first frame requests all paths and leaves by the first that arrives") {
  Unlinked one;
  one.send(FrameType::kGrant);
  CHECK_EQ(one.asked.paths.size(), 2u);
  CHECK(one.link.is_suspended());
  CHECK(one.link.has_queued());
  CHECK_EQ(one.states(), "dd");
  const auto fds = unix_sockets();
  CHECK(one.link.add_path(1, std::make_unique<SocketPipe>(fds[0]), {}));
  CHECK_EQ(one.states(), "do");
  const auto peer = std::make_unique<TcpLink>(0, 2, keys_of(1, 0));
  CHECK(peer->add_path(1, std::make_unique<SocketPipe>(fds[1]), {}));
  Recorder peers_sink;
  one.link.flush(one.sink);
  peer->pump(peers_sink);
  CHECK_EQ(peers_sink.came.size(), 1u);
}

TEST("a link begun by the peer is up, and requests the missing paths") {
  Unlinked one;
  const auto fds = unix_sockets();
  CHECK(one.link.add_path(0, std::make_unique<SocketPipe>(fds[0]), {}));
  CHECK(!one.link.is_unlinked());
  one.link.dial();
  CHECK(one.asked.paths == std::set<size_t>{1});
  close(fds[1]);
  for (int n = 0; n < 3; ++n) one.link.pump(one.sink);
  CHECK(one.link.is_suspended());
  CHECK_EQ(one.states(), "ld");
}

TEST("a peer first used long after the start is listened to from then on") {
  Unlinked one;
  one.look(kSecond, 60 * kSecond);
  one.send(FrameType::kGrant);
  const auto fds = unix_sockets();
  CHECK(one.link.add_path(0, std::make_unique<SocketPipe>(fds[0]), {}));  // before any other look
  CHECK(one.link.listens_since() >= 59 * kSecond);
  close(fds[1]);
}

TEST("a goodbye makes no connection, delays no end, and is sent if the peer connects") {
  Unlinked one;
  one.send(FrameType::kGoodbye);
  CHECK(one.asked.paths.empty());
  CHECK(!one.link.has_queued());
  const auto fds = unix_sockets();
  CHECK(one.link.add_path(0, std::make_unique<SocketPipe>(fds[0]), {}));
  const auto peer = link_over(0, {fds[1]}, keys_of(1, 0));
  Recorder peers_sink;
  one.link.flush(one.sink);
  peer->pump(peers_sink);
  CHECK_EQ(peers_sink.came.size(), 1u);
  CHECK(peers_sink.came[0].header.type == FrameType::kGoodbye);
}

TEST("a peer that never answers is lost after the time to resume, or after 10 s without one") {
  for (const int64_t resume_ns : {30 * kSecond, int64_t{0}}) {
    Unlinked one;
    one.asked.how_long_ns = resume_ns;
    const int64_t most = resume_ns > 0 ? resume_ns : 10 * kSecond;
    one.send(FrameType::kGrant);
    one.look(kSecond, kSecond + most);
    CHECK(!one.sink.is_over);
    one.look(kSecond + most, 2 * kSecond + most);
    CHECK(one.sink.is_over);
    CHECK(one.asked.has_ended);
    CHECK(has(one.sink.why.text, "could not be connected to: nothing answered for " +
                                     std::to_string(most / kSecond) +
                                     ".0 s (SHOAL_RESUME_S): Connection timed out"));
    CHECK(!one.sink.why.is_unmet);
  }
}

TEST("a peer that is gone before any connection is lost at once, with its own error") {
  Unlinked one;
  one.send(FrameType::kGrant);
  one.link.give_up("no process listens at 10.0.0.3:4711 any more");
  one.link.pump(one.sink);
  CHECK(one.sink.is_over);
  CHECK_EQ(one.sink.why.text,
           "could not be connected to: no process listens at 10.0.0.3:4711 any more");
  CHECK(one.sink.why.is_unmet);
  CHECK_EQ(one.states(), "ee");
}

TEST("a waiter for a path is asked for it, and the path is dialled") {
  Unlinked one;
  one.link.doubt(one.sink, 1);
  CHECK_EQ(one.asked.paths.size(), 2u);
}

TEST("only unacknowledged data is owed, even over another path") {
  Unlinked one;
  one.send(FrameType::kGrant);
  CHECK(!one.link.owes_data());
  const Bytes payload(10, std::byte{1});
  one.link.send(data_frame(payload, 1));
  CHECK(one.link.owes_data());
  const auto lost = unix_sockets(), fds = unix_sockets();
  CHECK(one.link.add_path(0, std::make_unique<SocketPipe>(lost[0]), {}));
  one.link.flush(one.sink);
  CHECK(!one.link.has_queued() && one.link.owes_data());
  close(lost[1]);
  one.link.pump(one.sink);
  CHECK(one.link.is_suspended() && one.link.owes_data());
  CHECK(one.link.add_path(0, std::make_unique<SocketPipe>(fds[0]), {}));
  one.send(FrameType::kGoodbye);  // requests the path: nothing else would, for a copied payload
  const auto peer = link_over(0, {fds[1]}, keys_of(1, 0));
  Recorder peers_sink;
  peer->pump(peers_sink);
  peer->flush(peers_sink);
  CHECK(one.link.owes_data());
  one.link.pump(one.sink);
  CHECK(!one.link.owes_data());
}

}  // namespace
}  // namespace shoal::test
