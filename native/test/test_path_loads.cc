// The choice among several paths for bulk data.
#include "test/links.h"
#include "transport/path_loads.h"

namespace shoal::test {
namespace {

// A pipe that accepts everything, and confirms as the test directs.
class Taker final : public Pipe {
 public:
  ssize_t write(const iovec* vectors, size_t n_vectors) override {
    size_t n_bytes = 0;
    for (size_t at = 0; at < n_vectors; ++at) n_bytes += vectors[at].iov_len;
    n_written += n_bytes;
    return static_cast<ssize_t>(n_bytes);
  }
  ssize_t read(const iovec*, size_t) override {
    errno = EAGAIN;
    return -1;
  }
  void end(bool) override {}
  int64_t n_unconfirmed() const override { return static_cast<int64_t>(n_written - n_confirmed); }

  size_t n_written = 0, n_confirmed = 0;
};

constexpr size_t kFrame = 64u << 10;

// Two paths to one peer; the test sets how much slower the second is.
struct TwoPaths {
  explicit TwoPaths(PathLoads& loads) {
    for (size_t path = 0; path < 2; ++path)
      shares.push_back(std::make_unique<PathShare>(loads, path, pipes[path]));
  }
  void take(size_t path, size_t n_bytes, int64_t now, bool is_bulk = true) {
    shares[path]->took(n_bytes, now, is_bulk);
    shares[path]->wrote(n_bytes);
    pipes[path].n_written += n_bytes;
  }

  std::array<Taker, 2> pipes;
  std::vector<std::unique_ptr<PathShare>> shares;
};

size_t soonest(const PathLoads& loads, int64_t now) {
  return loads.due(1, kFrame, now) < loads.due(0, kFrame, now) ? 1 : 0;
}

TEST("paths get shares in proportion to their rates from the first known rates, and none is idle") {
  for (const size_t times : {1, 3, 10}) {
    PathLoads loads;
    TwoPaths paths(loads);
    std::array<size_t, 2> n_sent{}, n_idle{};
    int64_t now = kSecond;
    constexpr int64_t kStep = kMillisecond;
    const std::array<size_t, 2> carries = {50'000, 50'000 / times};  // per step
    for (int step = 0; step < 1000; ++step, now += kStep) {
      for (size_t path = 0; path < 2; ++path) {
        Taker& pipe = paths.pipes[path];
        if (step >= 200) n_idle[path] += pipe.n_unconfirmed() == 0;
        pipe.n_confirmed = std::min(pipe.n_written, pipe.n_confirmed + carries[path]);
      }
      loads.look(now);
      // The bytes out are bounded, as by turns.
      while (paths.pipes[0].n_unconfirmed() + paths.pipes[1].n_unconfirmed() < 1'000'000) {
        const size_t path = soonest(loads, now);
        paths.take(path, kFrame, now);
        n_sent[path] += step >= 200 ? kFrame : 0;
      }
    }
    CHECK_EQ(n_idle[0] + n_idle[1], 0U);
    const double ratio = static_cast<double>(n_sent[0]) / static_cast<double>(n_sent[1]);
    CHECK(ratio > 0.95 * static_cast<double>(times) && ratio < 1.05 * static_cast<double>(times));
  }
}

TEST("one link's data in flight counts for the paths of the others") {
  PathLoads loads;
  TwoPaths one(loads), other(loads);
  one.take(0, kFrame, kSecond);
  CHECK_EQ(soonest(loads, kSecond), 1U);
  other.take(1, 2 * kFrame, kSecond);
  CHECK_EQ(soonest(loads, kSecond), 0U);
  one.shares.clear();  // lost: none of its bytes are in flight
  CHECK(loads.due(0, kFrame, kSecond) < loads.due(1, kFrame, kSecond));
  CHECK_EQ(loads.due(0, kFrame, kSecond), static_cast<double>(kFrame));
}

TEST("a stopped peer holds up no path") {
  PathLoads loads;
  TwoPaths stopped(loads), other(loads);
  stopped.take(0, 100 * kFrame, kSecond);
  int64_t now = kSecond;
  for (; now < kSecond + PathShare::kStandsStillNs; now += PathLoads::kLookNs) {
    loads.look(now);
    CHECK_EQ(soonest(loads, now), 1U);
  }
  loads.look(now);
  other.take(1, kFrame, now);
  CHECK_EQ(soonest(loads, now), 0U);
  stopped.pipes[0].n_confirmed = stopped.pipes[0].n_written;  // it continues
  loads.look(now += PathLoads::kLookNs);
  CHECK_EQ(soonest(loads, now), 0U);
}

TEST("a slow path is tried again, and with more data as time passes") {
  PathLoads loads;
  TwoPaths paths(loads);
  int64_t now = kSecond;
  paths.take(0, 10'000'000, now);
  paths.take(1, 200'000, now);
  for (int step = 0; step < 50; ++step) {
    paths.pipes[0].n_confirmed += 100'000;
    paths.pipes[1].n_confirmed += 1'000;
    loads.look(now += kMillisecond);
  }
  for (Taker& pipe : paths.pipes) pipe.n_confirmed = pipe.n_written;
  loads.look(now += kMillisecond);
  paths.take(0, 5 * kFrame, now);  // 3 ms of it, and a frame of the other takes 66
  CHECK_EQ(soonest(loads, now), 0U);
  CHECK_EQ(soonest(loads, now + 2 * PathLoads::kDoubledNs), 0U);
  CHECK_EQ(soonest(loads, now + 5 * PathLoads::kDoubledNs), 1U);
  const auto due = [&](int64_t at) { return loads.due(1, kFrame, at); };
  CHECK(due(now + 5 * PathLoads::kDoubledNs) > loads.due(0, kFrame, now) / 6);
}

TEST("distance does not make a path count as slow when it has one frame in flight at a time") {
  PathLoads loads;
  TwoPaths paths(loads);
  int64_t now = kSecond;
  const auto measure = [&] {
    for (int step = 0; step < 60; ++step) {
      for (size_t path = 0; path < 2; ++path) paths.take(path, 50'000, now);
      for (Taker& pipe : paths.pipes)
        pipe.n_confirmed = pipe.n_written - std::min<size_t>(pipe.n_written, 200'000);
      loads.look(now += kMillisecond);
    }
    for (Taker& pipe : paths.pipes) pipe.n_confirmed = pipe.n_written;
    loads.look(now += kMillisecond);
  };
  measure();
  const double before = loads.due(1, kFrame, now);
  for (int frame = 0; frame < 50; ++frame) {
    paths.take(1, kFrame, now);
    loads.look(now += 4 * kMillisecond);
    paths.pipes[1].n_confirmed = paths.pipes[1].n_written - 100;  // in two acknowledgements
    loads.look(now += 4 * kMillisecond);
    paths.pipes[1].n_confirmed = paths.pipes[1].n_written;
    loads.look(now += 4 * kMillisecond);
  }
  CHECK(loads.due(1, kFrame, now) <= before);
}

// The shares of bulk data that two paths get from now on, if each carries 50'000 bytes per ms.
double share_of_first(PathLoads& loads, TwoPaths& paths, int64_t& now, int n_steps) {
  std::array<size_t, 2> n_sent{};
  for (int step = 0; step < n_steps; ++step, now += kMillisecond) {
    for (Taker& pipe : paths.pipes)
      pipe.n_confirmed = std::min(pipe.n_written, pipe.n_confirmed + 50'000);
    loads.look(now);
    while (paths.pipes[0].n_unconfirmed() + paths.pipes[1].n_unconfirmed() < 1'000'000) {
      const size_t path = soonest(loads, now);
      paths.take(path, kFrame, now);
      n_sent[path] += kFrame;
    }
  }
  return static_cast<double>(n_sent[0]) / static_cast<double>(n_sent[0] + n_sent[1]);
}

TEST("small data and data that was not polled for long make no path count as slow") {
  PathLoads loads;
  TwoPaths paths(loads);
  int64_t now = kSecond;
  share_of_first(loads, paths, now, 100);
  for (int call = 0; call < 8; ++call) {  // as barriers do, some time apart
    for (Taker& pipe : paths.pipes) pipe.n_confirmed = pipe.n_written;
    loads.look(now += 50 * kMillisecond);
    paths.take(0, 100, now, false);
  }
  for (int word = 0; word < 100; ++word) {  // as one after the other does
    loads.look(now += 2 * kMillisecond);
    paths.pipes[0].n_confirmed = paths.pipes[0].n_written;
    loads.look(now += kMillisecond);
    paths.take(0, 100, now, false);
  }
  const double share = share_of_first(loads, paths, now, 30);
  CHECK(share > 0.45 && share < 0.55);
}

TEST("a late poll after bulk data arrived does not measure its duration") {
  PathLoads loads;
  TwoPaths paths(loads);
  int64_t now = kSecond;
  for (int call = 0; call < 8; ++call) {
    share_of_first(loads, paths, now, 40);
    paths.pipes[1].n_confirmed = paths.pipes[1].n_written;
    loads.look(now += kMillisecond);
    paths.pipes[0].n_confirmed = paths.pipes[0].n_written;  // a moment later, without a poll
    loads.look(now += 300 * kMillisecond);
  }
  const double share = share_of_first(loads, paths, now, 30);
  CHECK(share > 0.45 && share < 0.55);
}

Frame data(const Bytes& payload, uint32_t segment, bool is_bulk) {
  Frame frame = data_frame(payload, segment, segment + 1);
  frame.is_bulk = is_bulk;
  return frame;
}

TEST("bulk data of a link takes the path that delivers it soonest, and small data any path") {
  const Bytes payload(kFrame);
  auto owned = std::make_unique<TcpLink>(1, 2, keys_of(0, 1));
  TcpLink& link = *owned;
  std::array<Taker*, 2> pipes{};
  for (size_t path = 0; path < 2; ++path) {
    auto pipe = std::make_unique<Taker>();
    pipes[path] = pipe.get();
    CHECK(link.add_path(path, std::move(pipe), {}));
  }
  Recorder sink;
  sink.expected_peer = 1;
  for (uint32_t segment = 0; segment < 6; ++segment) link.send(data(payload, segment, true));
  link.flush(sink);
  CHECK_EQ(pipes[0]->n_written, 3 * (kFrame + sizeof(Header)));  // nothing more is known of them
  CHECK_EQ(pipes[1]->n_written, 3 * (kFrame + sizeof(Header)));
  link.send(data(payload, 6, true));
  link.flush(sink);
  CHECK_EQ(pipes[0]->n_written, 4 * (kFrame + sizeof(Header)));
  const Bytes word(8);
  link.send(data(word, 7, false));  // NOT after bulk data that waits for the other path
  link.flush(sink);
  CHECK_EQ(pipes[0]->n_written, 4 * (kFrame + sizeof(Header)) + 8 + sizeof(Header));
}

TEST("data that one path delivers soonest waits for it, and leaves by another when it is lost") {
  const Bytes payload(kFrame);
  const auto [near, far] = tcp_sockets();
  const auto [other_near, other_far] = tcp_sockets();
  const auto owned = link_over(1, {near, other_near}, keys_of(0, 1));
  const auto peer_owned = link_over(0, {far, other_far}, keys_of(1, 0));
  Recorder sink, peers_sink;
  sink.expected_peer = 1;
  constexpr uint32_t kFrames = 200;
  for (uint32_t segment = 0; segment < kFrames; ++segment)
    owned->send(data(payload, segment, true));
  owned->flush(sink);
  CHECK(owned->has_queued());
  shutdown(near, SHUT_RDWR);
  while (peers_sink.came.size() < kFrames) {
    owned->pump(sink);
    peer_owned->pump(peers_sink);
  }
  CHECK(!sink.is_over && !peers_sink.is_over);
}

}  // namespace
}  // namespace shoal::test
