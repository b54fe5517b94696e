// Links that lose all their paths and get them back: which frames wait or go again, and the end.
#include <linux/filter.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <set>
#include <utility>

#include "test/links.h"
#include "transport/socket_pipe.h"

namespace shoal::test {
namespace {

constexpr int64_t kResumeNs = 10 * kSecond;

// Records a link's requests.
struct Asked final : PathSource {
  int64_t resume_ns() const override { return kResumeNs; }
  void attached(int, PathLink&) override {}
  void want(int, size_t path) override { paths.insert(path); }
  void ended(int) override { has_ended = true; }

  std::set<size_t> paths;
  bool has_ended = false;
};

// Two links over sockets that the test cuts and replaces by hand.
struct ResumedPair final : Pair {
  explicit ResumedPair(size_t n_paths) : paths(n_paths) {
    for (auto& path : paths) path = unix_sockets();
    for (const size_t end : {0, 1}) {
      std::vector<int> fds;
      for (const auto& path : paths) fds.push_back(path[end]);
      const int own = static_cast<int>(end);
      links[end] = link_over(1 - own, fds, keys_of(own, 1 - own));
      tcp(end).resume_by(asked[end]);
    }
  }
  ~ResumedPair() override { links = {}; }  // before the source that they refer to
  TcpLink& tcp(size_t end) { return static_cast<TcpLink&>(*links[end]); }
  void cut(size_t path) { shutdown(paths[path][0], SHUT_RDWR); }
  void cut_all() {
    for (size_t path = 0; path < paths.size(); ++path) cut(path);
    settle();
  }
  // A new connection, which the ends get at different times.
  void make(size_t path) { paths[path] = unix_sockets(); }
  bool give(size_t end, size_t path) {
    asked[end].paths.erase(path);
    return tcp(end).add_path(path, std::make_unique<SocketPipe>(paths[path][end]), {});
  }
  void replace_path(size_t path) {
    make(path);
    for (const size_t end : {0, 1}) CHECK(give(end, path));
  }
  void tick(int64_t now) {
    for (const size_t end : {0, 1}) links[end]->look(sinks[end], now);
  }

  std::vector<std::array<int, 2>> paths;
  std::array<Asked, 2> asked;
};

// ---- suspended, resumed

TEST("a link without a path releases nothing and keeps its frames until it has a path again") {
  ResumedPair pair(1);
  const Bytes payload(100 << 10, std::byte{5});
  constexpr uint32_t kFrames = 40;
  for (uint32_t number = 0; number < kFrames; ++number) {
    if (number == 20) pair.cut_all();
    for (const int end : {0, 1}) {
      pair.link(end).send(data_frame(payload, number, number + 1));
      pair.pump(end);
    }
  }
  const size_t n_came = pair.sink(1).came.size();
  CHECK(n_came < kFrames);
  for (const int end : {0, 1}) {
    CHECK(pair.link(end).is_suspended());
    CHECK(!pair.sink(end).is_over);
    CHECK(pair.asked[static_cast<size_t>(end)].paths == std::set<size_t>{0});
  }
  pair.settle();
  CHECK_EQ(pair.sink(1).came.size(), n_came);
  pair.replace_path(0);
  const auto all = [&](int end) {
    return pair.sink(end).came.size() == kFrames && pair.sink(end).n_sent.size() == kFrames;
  };
  CHECK(pair.run([&] { return all(0) && all(1); }));
  for (const int end : {0, 1}) {
    uint32_t next = 0;
    for (const auto& came : pair.sink(end).came) check_came(came, payload, next++);
    for (const auto& [token, n_times] : pair.sink(end).n_sent) CHECK_EQ(n_times, 1);
  }
}

TEST("whatever paths do, even all at once, each frame arrives once and control in order") {
  uint64_t n_cut = 0, n_reconnects = 0;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    FakeNet::Options options = fake_options();
    options.seed = seed;
    options.n_paths = 1 + static_cast<uint32_t>(seed % 4);
    options.path_cuts = seed % 3 == 2 ? 0 : 0.02;
    options.path_mutes = seed % 3 == 0 ? 0 : 0.005;
    options.longest_remake = 1 + seed % 50;
    options.delays = options.splits = 0.3;
    FakePair pair(options);
    FakeRandom random(seed);
    const Bytes payload = random_bytes(random, 3000);
    for (uint32_t number = 0; number < 50; ++number) {
      for (const int end : {0, 1}) {
        pair.link(end).send(data_frame(payload, number, number + 1));
        Frame grant;
        grant.header.type = FrameType::kGrant;
        grant.header.segment = number;
        pair.link(end).send(grant);
        if (random.chance(0.3)) pair.pump(end);
      }
    }
    const auto all = [&](int end) {
      return pair.sink(end).came.size() == 100 && pair.sink(end).n_sent.size() == 50;
    };
    for (int n = 0; n < 30'000 && !(all(0) && all(1)); ++n)
      for (const int end : {0, 1}) pair.pump(end);
    for (const int end : {0, 1}) {
      CHECK(all(end));
      uint32_t next = 0;
      std::set<uint32_t> seen;
      for (const auto& one : pair.sink(end).came) {
        if (one.header.type == FrameType::kGrant) {
          CHECK_EQ(one.header.segment, next++);
          continue;
        }
        check_came(one, payload, one.header.segment);
        CHECK(seen.insert(one.header.segment).second);
      }
      for (const auto& [token, n_times] : pair.sink(end).n_sent) CHECK_EQ(n_times, 1);
    }
    n_cut += pair.net.n_paths_cut();
    n_reconnects += pair.net.n_path_reconnects();
  }
  CHECK(n_cut > 500);
  CHECK(n_reconnects > 400);
}

TEST("control that moved to another path stays there when the first is back") {
  ResumedPair pair(2);
  const auto grant = [&](uint32_t number) {
    Frame frame;
    frame.header.type = FrameType::kGrant;
    frame.header.segment = number;
    pair.link(0).send(frame);
    pair.link(0).flush(pair.sink(0));
  };
  pair.cut(0);
  pair.settle();
  grant(0);  // in the other path, unread
  pair.replace_path(0);
  grant(1);
  CHECK(pair.run([&] { return pair.sink(1).came.size() == 2; }));
  for (uint32_t number : {0u, 1u}) CHECK_EQ(pair.sink(1).came[number].header.segment, number);
}

TEST("a path made again replaces one that this end still took for alive") {
  ResumedPair pair(1);
  const Bytes payload(3000, std::byte{2});
  pair.link(1).send(data_frame(payload, 0, 1));
  pair.pump(1);
  pair.cut(0);
  pair.pump(0);  // has the frame, and no path; the other end does not know yet
  pair.pump(0);
  CHECK(pair.link(0).is_suspended());
  CHECK(!pair.link(1).is_suspended());
  pair.replace_path(0);
  CHECK(pair.run([&] { return pair.sink(1).n_sent[1] == 1; }));
  CHECK_EQ(pair.sink(0).came.size(), 1u);
  CHECK(!pair.asked[1].paths.contains(0));
}

TEST("an acknowledgement lost with its path is sent again by another") {
  ResumedPair pair(2);
  const Bytes payload(5000, std::byte{1});
  // The first path is restored after the second has carried control: data goes by the first.
  pair.cut(0);
  pair.settle();
  pair.replace_path(0);
  pair.settle();
  pair.link(0).send(data_frame(payload, 1, 9));
  pair.pump(0);
  pair.pump(1);  // takes the frame
  pair.pump(1);  // and acknowledges it by the second path
  CHECK_EQ(pair.sink(1).came.size(), 1u);
  std::array<std::byte, 4096> lost{};
  while (recv(pair.paths[1][0], lost.data(), lost.size(), MSG_DONTWAIT) > 0) {
  }
  pair.cut(1);
  CHECK(pair.run([&] { return pair.sink(0).n_sent[9] == 1; }));
}

TEST("a partly received frame arrives whole after the link has resumed") {
  const Bytes payload(20'000, std::byte{7});
  const Bytes bytes = bytes_of({data_frame(payload, 1)});
  auto before = unix_sockets(), after = unix_sockets();
  Asked asked;
  const auto owned = link_over(0, {before[1]}, keys_of(1, 0));
  TcpLink& link = *owned;
  link.resume_by(asked);
  Recorder sink;
  CHECK_EQ(send(before[0], bytes.data(), 10'000, 0), 10'000);
  link.pump(sink);
  close(before[0]);
  for (int n = 0; n < 3; ++n) link.pump(sink);
  CHECK(link.is_suspended());
  CHECK(link.add_path(0, std::make_unique<SocketPipe>(after[1]), {}));
  CHECK_EQ(send(after[0], bytes.data(), bytes.size(), 0), static_cast<ssize_t>(bytes.size()));
  link.pump(sink);
  CHECK_EQ(sink.came.size(), 1u);
  CHECK(sink.came[0].payload == payload);
  link.close();
  close(after[0]);
}

// ---- how it ends

TEST("a link without a path for its time to resume breaks, and reports how long and why") {
  ResumedPair pair(2);
  pair.tick(kSecond);
  pair.cut_all();
  int64_t now = kSecond;
  for (; now < kSecond + kResumeNs; now += 100 * kMillisecond) {
    pair.tick(now);
    CHECK(!pair.sink(0).is_over);
  }
  pair.tick(now);
  CHECK(pair.sink(0).is_over);
  CHECK(has(pair.sink(0).why.text, "closed the connection without a goodbye"));
  CHECK(has(pair.sink(0).why.text, "no connection could be made again for 10.0 s"));
  CHECK(pair.asked[0].has_ended);
  CHECK(!pair.give(0, 0));
}

TEST("time in which this process did not run is not counted against the peer") {
  ResumedPair pair(1);
  pair.tick(kSecond);
  pair.cut_all();
  pair.tick(2 * kSecond);
  pair.tick(60 * kSecond);
  CHECK(!pair.sink(0).is_over);
  pair.replace_path(0);
  pair.link(0).send(Frame{});
  CHECK(pair.run([&] { return pair.sink(1).came.size() == 1; }));
}

TEST("time without a path is counted from zero at each loss") {
  ResumedPair pair(1);
  int64_t now = kSecond;
  const auto pass = [&](int64_t ns) {
    for (const int64_t until = now + ns; now < until; now += 100 * kMillisecond) pair.tick(now);
  };
  for (int round = 0; round < 3; ++round) {
    pair.cut_all();
    pass(6 * kSecond);
    pair.replace_path(0);
    pass(kSecond);
  }
  CHECK(!pair.sink(0).is_over);
}

TEST("a peer known to be gone is lost at once, unless a path shows otherwise") {
  ResumedPair pair(2);
  pair.cut(0);
  pair.settle();
  pair.tcp(0).give_up("nobody listens there");
  pair.settle();
  CHECK(!pair.sink(0).is_over);
  pair.cut(1);
  pair.settle();
  CHECK(!pair.sink(0).is_over);
  pair.tcp(0).give_up("nobody listens there");
  pair.settle();
  CHECK(pair.sink(0).is_over);
  CHECK(has(pair.sink(0).why.text, "without a goodbye"));
  CHECK(has(pair.sink(0).why.text, "; nobody listens there"));
}

TEST("a peer that has sent a goodbye is not dialled") {
  ResumedPair pair(1);
  Frame goodbye;
  goodbye.header.type = FrameType::kGoodbye;
  pair.link(0).send(goodbye);
  CHECK(pair.run([&] { return pair.sink(1).came.size() == 1; }));
  CHECK(pair.asked[1].has_ended);
  pair.cut_all();
  CHECK(pair.asked[1].paths.empty());
  CHECK(!pair.link(1).is_suspended());
  CHECK(pair.sink(1).is_over);
}

TEST("a goodbye without a path is kept until it can be sent") {
  ResumedPair pair(1);
  pair.cut_all();
  Frame goodbye;
  goodbye.header.type = FrameType::kGoodbye;
  pair.link(0).send(goodbye);
  CHECK(pair.link(0).has_queued());
  pair.replace_path(0);
  CHECK(pair.run([&] { return pair.sink(1).came.size() == 1; }));
  CHECK(!pair.link(0).has_queued());
}

TEST("a link closed while suspended requests no path and accepts none") {
  ResumedPair pair(1);
  pair.cut_all();
  pair.link(0).close();
  CHECK(pair.asked[0].has_ended);
  pair.make(0);
  CHECK(!pair.give(0, 0));
  CHECK(!pair.link(0).is_suspended());
  close(pair.paths[0][1]);
}

TEST("memory released while the link is suspended is not read when it resumes") {
  ResumedPair pair(1);
  auto payload = std::make_unique<Bytes>(5000, std::byte{1});
  const Bytes small(10, std::byte{2});
  pair.link(0).send(data_frame(*payload, 0, 9));
  pair.pump(0);  // it has left, and never arrives
  pair.cut(0);
  pair.pump(0);
  pair.pump(0);
  std::array<std::byte, 8192> away{};
  while (recv(pair.paths[0][1], away.data(), away.size(), MSG_DONTWAIT) > 0) {
  }
  pair.settle();
  CHECK(pair.link(1).is_suspended());
  CHECK(pair.link(0).release(1, call_of(data_frame(*payload, 0).header)));
  payload.reset();
  pair.link(0).send(data_frame(small, 1));
  pair.replace_path(0);
  CHECK(pair.run([&] { return !pair.sink(1).came.empty(); }));
  pair.settle();
  check_came(pair.sink(1).came.back(), small, 1);
}

TEST("heartbeats are not kept for a later path") {
  ResumedPair pair(1);
  pair.cut_all();
  for (int n = 0; n < 100; ++n) pair.link(0).send(Frame{});
  CHECK(!pair.link(0).has_queued());
}

TEST("a peer's request for a path made since the last look does not end that path") {
  ResumedPair pair(2);
  pair.tick(kSecond);
  pair.cut(0);
  pair.settle();
  pair.replace_path(0);
  pair.tick(3 * kSecond);  // this end was late: the path is new all the same
  pair.tcp(1).doubt(pair.sink(1), 0);
  CHECK(pair.asked[1].paths.empty());
  pair.tick(4 * kSecond);
  pair.tcp(1).doubt(pair.sink(1), 0);
  CHECK(pair.asked[1].paths == std::set<size_t>{0});
}

// ---- silence

TEST("a path that acknowledges nothing while another does is dropped, and its frames go again") {
  FakeNet::Options options = fake_options();
  options.n_paths = 2;
  options.longest_remake = 1000;
  FakePair pair(options);
  const Bytes payload(3000, std::byte{4});
  pair.net.mute_path(0, 1, 0);
  for (uint32_t number = 0; number < 10; ++number)
    pair.link(0).send(data_frame(payload, number, number + 1));
  int64_t n_steps = 0;
  for (; pair.sink(0).n_sent.size() < 10; ++n_steps) {
    CHECK(n_steps < 200);
    for (const int end : {0, 1}) pair.pump(end);
  }
  CHECK_EQ(pair.sink(1).came.size(), 10u);
  CHECK(n_steps >= 40);  // NOT at once: each of these steps takes two milliseconds
}

TEST("where no path answers, none is given up for two seconds") {
  FakeNet::Options options = fake_options();
  options.n_paths = 2;
  options.longest_remake = 1;
  FakePair pair(options);
  const Bytes payload(3000, std::byte{4});
  for (const uint32_t path : {0u, 1u}) pair.net.mute_path(0, 1, path);
  pair.link(0).send(data_frame(payload, 0, 1));
  while (pair.n_steps < 1950) pair.pump(0);
  CHECK(!pair.link(0).is_suspended());
  CHECK_EQ(pair.net.n_path_reconnects(), 0u);
  for (int n = 0; n < 200; ++n)
    for (const int end : {0, 1}) pair.pump(end);
  CHECK(pair.net.n_path_reconnects() > 0);
  CHECK_EQ(pair.sink(0).n_sent[1], 1);
}

// A pipe whose every write fails, and that was silent for so long.
struct FailingPipe final : Pipe {
  FailingPipe(int why_not, int64_t silent_ns) : error(why_not), silent_for_ns(silent_ns) {}
  ssize_t write(const iovec*, size_t) override {
    errno = error;
    return -1;
  }
  ssize_t read(const iovec*, size_t) override {
    errno = EAGAIN;
    return -1;
  }
  void end(bool) override {}
  Silence silence() override { return {silent_for_ns, silent_for_ns, 0}; }
  size_t appetite() const override { return 1; }  // pulls one frame

  const int error;
  const int64_t silent_for_ns;
};

TEST("a silent path is kept while the only other one is about to be lost") {
  TcpLink link(1, 2, keys_of(0, 1));
  Recorder sink;
  sink.expected_peer = 1;
  CHECK(link.add_path(0, std::make_unique<FailingPipe>(EAGAIN, kSecond), {}));
  CHECK(link.add_path(1, std::make_unique<FailingPipe>(EPIPE, 0), {}));
  const Bytes payload(10);
  for (const uint32_t number : {0u, 1u}) link.send(data_frame(payload, number));
  link.flush(sink);
  link.look(sink, kSecond);
  CHECK_EQ(link.fds().size(), 2u);
}

// Writes more than fits, until the kernel has confirmed the bytes in flight and the rest waits.
void fill(SocketPipe& pipe) {
  Bytes much(1 << 20);
  const iovec vector = {much.data(), much.size()};
  while (pipe.write(&vector, 1) > 0) {
  }
  // NOT just until nothing is owed: in the millisecond of a confirmation nothing ever seems owed.
  for (Pipe::Silence silence; silence.owed_ns > 0 || silence.since_confirmed_ns == 0;
       silence = pipe.silence())
    poll(nullptr, 0, 1);
}

TEST("over TCP a stopped program is not silent, even when it is sent more than fits") {
  const auto fds = tcp_sockets();
  SocketPipe pipe(fds[0]);
  fill(pipe);
  CHECK_EQ(pipe.silence().owed_ns, 0);
  close(fds[1]);
}

// From now on the kernel receives nothing for this socket.
void drop_all_for(int fd) {
  sock_filter nothing = {BPF_RET | BPF_K, 0, 0, 0};
  const sock_fprog drop_all = {1, &nothing};
  CHECK_EQ(setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &drop_all, sizeof(drop_all)), 0);
}

TEST("over TCP a byte is owed since it was sent, however long the connection was idle before") {
  const auto fds = tcp_sockets();
  SocketPipe pipe(fds[0]);
  std::byte byte{1};
  const iovec vector = {&byte, 1};
  CHECK_EQ(pipe.write(&vector, 1), 1);
  while (pipe.n_unconfirmed() > 0) poll(nullptr, 0, 1);
  drop_all_for(fds[1]);
  for (const int64_t until = now_ns() + 100 * kMillisecond; now_ns() < until;) poll(nullptr, 0, 1);
  const int64_t sent_ns = now_ns();
  CHECK_EQ(pipe.write(&vector, 1), 1);
  const int64_t owed_ns = pipe.silence().owed_ns;
  CHECK(0 < owed_ns && owed_ns <= now_ns() - sent_ns);
  close(fds[1]);
}

TEST("over TCP an end that answers no probe of its full window is silent") {
  const auto fds = tcp_sockets();
  SocketPipe pipe(fds[0]);
  fill(pipe);
  drop_all_for(fds[1]);
  // The kernel probes after 200 ms or so, and again after twice that.
  int64_t owed_ns = 0;
  for (int n = 0; n < 30'000 && owed_ns < 300'000'000; ++n) {
    poll(nullptr, 0, 1);
    owed_ns = pipe.silence().owed_ns;
  }
  CHECK(owed_ns >= 300'000'000);
  close(fds[1]);
}

}  // namespace
}  // namespace shoal::test
