// Links over several paths: which frames are numbered, acknowledged, resent and delivered.
#include <algorithm>
#include <thread>

#include "test/cluster.h"
#include "test/links.h"

namespace shoal::test {
namespace {

// ---- acknowledged

TEST("a payload returns to its owner when the peer has acknowledged it, not when it has left") {
  TcpPair pair({unix_sockets()});
  const Bytes payload(5000, std::byte{1});
  CHECK(!pair.link(0).send(data_frame(payload, 1, 9)));
  for (int n = 0; n < 3; ++n) pair.pump(0);
  CHECK(!pair.link(0).has_queued());
  CHECK(pair.sink(0).n_sent.empty());
  pair.pump(1);
  CHECK_EQ(pair.sink(1).came.size(), 1u);
  pair.pump(1);  // acknowledges it, as no other frame goes back
  pair.pump(0);
  CHECK_EQ(pair.sink(0).n_sent[9], 1);
}

TEST("frames in the other direction carry the acknowledgement") {
  TcpPair pair({unix_sockets()});
  const Bytes payload(5000, std::byte{1});
  pair.link(0).send(data_frame(payload, 1, 9));
  pair.pump(0);
  pair.pump(1);
  pair.link(1).send(data_frame(payload, 2, 8));
  pair.pump(1);
  pair.pump(0);
  CHECK_EQ(pair.sink(0).n_sent[9], 1);
  CHECK_EQ(pair.sink(0).came.size(), 1u);
}

TEST("small frames without a waiter are acknowledged before the window is full") {
  TcpPair pair({unix_sockets()});
  constexpr uint32_t kFrames = 3 * Outbox::kWindow;
  for (uint32_t number = 0; number < kFrames; ++number) {
    Frame frame = data_frame({}, number);
    frame.payload = nullptr;
    pair.link(0).send(frame);
  }
  CHECK(pair.run([&] { return pair.sink(1).came.size() == kFrames; }));
}

TEST("a peer that never acknowledges gets one window of frames and no more") {
  Outbox outbox({});
  for (uint32_t number = 0; number < 2 * Outbox::kWindow; ++number) outbox.send(Frame{});
  uint32_t n_pulled = 0;
  while (Outgoing* out = outbox.pull(0, true)) {
    outbox.written(*out);
    CHECK_EQ(out->frame.header.sequence, ++n_pulled);
  }
  CHECK_EQ(n_pulled, Outbox::kWindow);
  std::vector<uint64_t> tokens;
  CHECK(outbox.acknowledge(1, tokens));
  CHECK(outbox.pull(0, true) != nullptr);
}

TEST("an acknowledgement of an unsent frame breaks the link") {
  Stream stream;
  Header header;
  header.type = FrameType::kAck;
  header.acknowledged = 1;
  stream.write_sealed(header);
  CHECK(stream.sink.is_over);
  CHECK(has(stream.sink.why.text, "acknowledged frames that it was not sent"));
}

TEST("a frame far ahead of those before it breaks the link") {
  Stream stream;
  Header header;
  header.sequence = 1u << 20;
  stream.write_sealed(header);
  CHECK(has(stream.sink.why.text, "far ahead"));
}

TEST("an acknowledgement older than the last one changes nothing") {
  Stream stream;
  const Bytes payload(5000);
  for (uint32_t number = 1; number <= 3; ++number)
    stream.link->send(data_frame(payload, number, number));
  stream.link->flush(stream.sink);
  Header header;
  header.type = FrameType::kAck;
  uint64_t place = 0;
  for (const uint32_t upto : {2, 1, 0, 2}) {
    header.acknowledged = upto;
    stream.write_sealed(header, place++);
  }
  CHECK(!stream.sink.is_over);
  CHECK_EQ(stream.sink.n_sent.size(), 2u);
  CHECK_EQ(stream.sink.n_sent[1], 1);
  CHECK_EQ(stream.sink.n_sent[2], 1);
}

// The first frame of `bytes`, sealed for another path.
Bytes by_path(Bytes bytes, uint32_t path) {
  Header header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  header.seal = keys_of(0, 1).out(path).of(header, {0, header.sequence, header.acknowledged});
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

TEST("a frame that arrives by two paths is delivered once") {
  const Bytes payload(100, std::byte{3});
  const Bytes bytes = bytes_of({data_frame(payload, 1)});
  const auto one = unix_sockets(), other = unix_sockets();
  const auto link_owned = link_over(0, {one[1], other[1]}, keys_of(1, 0));
  TcpLink& link = *link_owned;
  Recorder sink;
  for (const uint32_t path : {0u, 1u}) {
    const Bytes sealed = by_path(bytes, path);
    CHECK_EQ(send((path == 0 ? one : other)[0], sealed.data(), sealed.size(), 0),
             static_cast<ssize_t>(sealed.size()));
    for (int n = 0; n < 4; ++n) link.pump(sink);
  }
  CHECK(!sink.is_over);
  CHECK_EQ(sink.came.size(), 1u);
  CHECK_EQ(sink.n_receive_buffers, 1);
  for (const int fd : {one[0], other[0]}) close(fd);
}

TEST("sequence numbers may wrap") {
  Inbox inbox;
  for (uint32_t n = 1; n != 10'000; ++n) {
    CHECK(inbox.judge(n) == Inbox::Verdict::kNew);
    inbox.take(n);
    CHECK(inbox.judge(n) == Inbox::Verdict::kAgain);
  }
  CHECK(inbox.judge(10'001) == Inbox::Verdict::kNew);
  inbox.take(10'001);
  CHECK_EQ(inbox.floor(), 9'999u);
  inbox.take(10'000);
  CHECK_EQ(inbox.floor(), 10'001u);
  CHECK(inbox.judge(inbox.floor() + (1u << 20)) == Inbox::Verdict::kBeyond);
}

// ---- paths that break

TEST("a path that breaks costs no frame while another lives, and its payloads are released once") {
  for (const bool first : {true, false}) {
    const auto one = unix_sockets(), other = unix_sockets();
    TcpPair pair({one, other});
    FakeRandom random(1);
    const Bytes payload = random_bytes(random, 100 << 10);
    constexpr uint32_t kFrames = 60;
    for (const int end : {0, 1})
      for (uint32_t number = 0; number < kFrames; ++number)
        pair.link(end).send(data_frame(payload, number, number + 1));
    CHECK(pair.run([&] { return pair.sink(1).came.size() >= 10; }));
    shutdown((first ? one : other)[0], SHUT_RDWR);
    const auto all = [&](int end) {
      return pair.sink(end).came.size() == kFrames && pair.sink(end).n_sent.size() == kFrames;
    };
    CHECK(pair.run([&] { return all(0) && all(1); }));
    for (const int end : {0, 1}) {
      std::vector<bool> seen(kFrames, false);
      for (const auto& came : pair.sink(end).came) {
        check_came(came, payload, came.header.segment);
        CHECK(!seen[came.header.segment]);
        seen[came.header.segment] = true;
      }
      for (const auto& [token, n_times] : pair.sink(end).n_sent) CHECK_EQ(n_times, 1);
      CHECK_EQ(static_cast<TcpLink&>(pair.link(end)).fds().size(), 1u);
      CHECK(!pair.sink(end).is_over);
    }
  }
}

TEST("losing the last path loses the peer") {
  const auto one = unix_sockets(), other = unix_sockets();
  TcpPair pair({one, other});
  shutdown(one[0], SHUT_RDWR);
  pair.settle();
  CHECK(!pair.sink(0).is_over && !pair.sink(1).is_over);
  shutdown(other[0], SHUT_RDWR);
  CHECK(pair.run([&] { return pair.sink(0).is_over && pair.sink(1).is_over; }));
  CHECK(has(pair.sink(1).why.text, "closed the connection without a goodbye"));
}

// The sender gave a path up and sent its frame again by another; or a liar sends a segment as two
// frames. Then the first continues.
void comes_by_another_path_first(bool by_a_liar) {
  const Bytes payload(20'000, std::byte{7});
  const Bytes twice = bytes_of({data_frame(payload, 1), data_frame(payload, 1)});
  const auto middle = twice.begin() + static_cast<std::ptrdiff_t>(twice.size() / 2);
  const Bytes first(twice.begin(), middle),
      second(by_a_liar ? middle : twice.begin(), by_a_liar ? twice.end() : middle);
  const auto slow = unix_sockets(), quick = unix_sockets();
  const auto link_owned = link_over(0, {slow[1], quick[1]}, keys_of(1, 0));
  TcpLink& link = *link_owned;
  Recorder sink;
  const auto write = [&](int fd, size_t from, size_t to) {
    const Bytes sealed = fd == slow[0] ? by_path(first, 0) : by_path(second, 1);
    CHECK_EQ(send(fd, sealed.data() + from, to - from, 0), static_cast<ssize_t>(to - from));
    link.pump(sink);
  };
  write(slow[0], 0, 10'000);
  std::byte* receive_buffer = sink.receive_buffers[0].get();
  CHECK(receive_buffer != nullptr);
  write(quick[0], 0, second.size());
  CHECK_EQ(sink.came.size(), 1u);
  std::fill_n(receive_buffer, payload.size(), std::byte{9});  // its owner has reused it
  write(slow[0], 10'000, first.size());
  CHECK(std::all_of(receive_buffer, receive_buffer + payload.size(),
                    [](std::byte byte) { return byte == std::byte{9}; }));
  CHECK_EQ(sink.came.size(), by_a_liar ? 2u : 1u);
  CHECK(!sink.is_over);
  for (const int fd : {slow[0], quick[0]}) close(fd);
}

TEST("a frame that already came by another path is not written to released memory") {
  for (const bool by_a_liar : {false, true}) comes_by_another_path_first(by_a_liar);
}

TEST("control frames keep their order and a goodbye comes last, whatever paths do") {
  uint64_t n_cut = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    FakeNet::Options options = fake_options();
    options.seed = seed;
    options.n_paths = 1 + static_cast<uint32_t>(seed % 4);
    options.path_cuts = 0.01;
    options.delays = options.splits = 0.4;
    FakePair pair(options);
    FakeRandom random(seed);
    const Bytes payload = random_bytes(random, 3000);
    for (uint32_t number = 0; number < 50; ++number) {
      pair.link(0).send(data_frame(payload, number, number + 1));
      Frame grant;
      grant.header.type = FrameType::kGrant;
      grant.header.segment = number;
      pair.link(0).send(grant);
      if (random.chance(0.3)) pair.pump(0);
    }
    Frame goodbye;
    goodbye.header.type = FrameType::kGoodbye;
    pair.link(0).send(goodbye);
    const auto& came = pair.sink(1).came;
    CHECK(pair.run([&] { return came.size() == 101 && pair.sink(0).n_sent.size() == 50; }));
    CHECK(came.back().header.type == FrameType::kGoodbye);
    uint32_t next = 0;
    for (const auto& one : came)
      if (one.header.type == FrameType::kGrant) CHECK_EQ(one.header.segment, next++);
    n_cut += pair.net.n_paths_cut();
  }
  CHECK(n_cut > 20);
}

// ---- between meshes, with threads and the progress thread

TEST("calls go on when one of two paths is cut in the middle of them, and no wakeup is late") {
  for (int round = 0; round < 5; ++round) {
    Cluster cluster(2, 1, 0, 2);
    Job job;
    job.kind = Kind::kDirectAllReduce;
    job.n_elems = 300'000;
    job.segment_bytes = 128u << 10;
    cluster.run_all(job);
    // Both ends of both paths; connections that only requested one are closed.
    CHECK(eventually([&] { return cluster.has_all_paths() && connections().size() == 4; }));
    const int victim = connections().front();
    in_threads(3, [&](int rank) {
      if (rank == 2) {
        for (int n = 0; n < round; ++n) std::this_thread::yield();
        shutdown(victim, SHUT_RDWR);
        return;
      }
      Job own = job;
      for (own.key = 1; own.key <= 8; ++own.key) cluster.run(rank, own);
    });
  }
}

}  // namespace
}  // namespace shoal::test
