// Links over TCP: damage to the bytes of a stream, the order of frames, and the end.
#include <netinet/tcp.h>

#include <fstream>

#include "test/links.h"
#include "transport/socket_pipe.h"

namespace shoal::test {
namespace {

// ---- damage

TEST("a flipped bit anywhere in a frame breaks the link and is reported as corruption") {
  FakeRandom random(7);
  const Bytes payload = random_bytes(random, 100);
  const Bytes whole = bytes_of({data_frame(payload, 3)});
  for (size_t at = 0; at < whole.size(); ++at) {
    Stream stream;
    Bytes damaged = whole;
    damaged[at] ^= std::byte{1} << random.below(8);
    stream.write(damaged.data(), damaged.size());
    CHECK(stream.sink.is_over);
    CHECK(stream.sink.came.empty());
    CHECK(has(stream.sink.why.text, at < sizeof(Header) ? "corrupt header" : "corrupt payload"));
  }
}

TEST("a frame arrives whole in whatever pieces it is written") {
  FakeRandom random(8);
  const Bytes payload = random_bytes(random, 3000);
  const Bytes whole =
      bytes_of({data_frame(payload, 0), data_frame(payload, 1), data_frame(payload, 2)});
  for (int n = 0; n < 30; ++n) {
    Stream stream;
    for (size_t at = 0; at < whole.size();) {
      const size_t piece =
          std::min<size_t>(whole.size() - at, 1 + random.below(n < 15 ? 100 : 4000));
      stream.write(whole.data() + at, piece);
      at += piece;
    }
    CHECK_EQ(stream.sink.came.size(), 3u);
    for (uint32_t at = 0; at < stream.sink.came.size(); ++at)
      check_came(stream.sink.came[at], payload, at);
  }
}

TEST("frames read while memory was short arrive once there is memory") {
  const Bytes payload(200, std::byte{6});
  std::vector<Frame> frames;
  for (uint32_t at = 0; at < 40; ++at) frames.push_back(data_frame(payload, at));
  const Bytes whole = bytes_of(frames);  // more than is read ahead
  Stream stream;
  stream.sink.lacks_memory = true;
  bool has_run_out = false;
  try {
    stream.write(whole.data(), whole.size());
  } catch (const std::bad_alloc&) {
    has_run_out = true;
  }
  CHECK(has_run_out);
  for (int n = 0; n < 10 && !stream.sink.is_over; ++n) stream.link->pump(stream.sink);
  CHECK(!stream.sink.is_over);
  CHECK_EQ(stream.sink.came.size(), frames.size());
}

TEST("garbage instead of a header breaks the link before anything lands") {
  FakeRandom random(9);
  for (int n = 0; n < 100; ++n) {
    Stream stream;
    const Bytes garbage = random_bytes(random, 64 + random.below(500));
    stream.write(garbage.data(), garbage.size());
    CHECK(stream.sink.is_over);
    CHECK_EQ(stream.sink.n_receive_buffers, 0);
    CHECK(has(stream.sink.why.text, "corrupt header"));
  }
}

TEST("an oversize payload breaks the link before memory is allocated") {
  for (const uint32_t n_bytes : {Header::kMaxPayload + 1, 0x7fffffffu, ~0u}) {
    Stream stream;
    Header header;
    header.type = FrameType::kData;
    header.length = n_bytes;
    stream.write_sealed(header);
    CHECK(stream.sink.is_over);
    CHECK_EQ(stream.sink.n_receive_buffers, 0);
    CHECK(has(stream.sink.why.text, std::to_string(n_bytes)));
  }
}

TEST("a frame of another version breaks the link") {
  Stream stream;
  Header header;
  header.version = Header::kVersion + 1;
  stream.write_sealed(header);
  CHECK(has(stream.sink.why.text, "version"));
}

TEST("the end of a stream in the middle of a frame breaks the link") {
  const Bytes payload(100);
  const Bytes whole = bytes_of({data_frame(payload, 3)});
  for (const size_t n_bytes : {size_t{1}, size_t{63}, size_t{64}, size_t{65}, whole.size() - 1}) {
    Stream stream;
    stream.write(whole.data(), n_bytes);
    CHECK(!stream.sink.is_over);
    shutdown(stream.raw, SHUT_WR);
    stream.link->pump(stream.sink);
    CHECK(stream.sink.is_over);
    CHECK(stream.sink.came.empty());
    CHECK(has(stream.sink.why.text, "closed the connection"));
  }
}

// ---- order and end

TEST("over TCP control and small messages overtake bulk data that has not begun to leave") {
  const auto [near, far] = unix_sockets();
  const auto link_owned = link_over(1, {near}, keys_of(0, 1));
  TcpLink& link = *link_owned;
  const auto peer_owned = link_over(0, {far}, keys_of(1, 0));
  TcpLink& peer = *peer_owned;
  Recorder sink, peers_sink;
  sink.expected_peer = 1;
  FakeRandom random(9);
  const Bytes payload = random_bytes(random, 128 << 10);
  constexpr uint32_t kFrames = 100;  // more than a socket holds
  for (uint32_t number = 0; number < kFrames; ++number)
    link.send(data_frame(payload, number, number + 1));
  link.flush(sink);
  CHECK(link.has_queued());
  const Bytes small = random_bytes(random, 4);
  link.send(data_frame(small, kFrames));
  for (const auto type : {FrameType::kGoodbye, FrameType::kGrant, FrameType::kPost}) {
    Frame frame;
    frame.header.type = type;
    link.send(frame);
  }
  while (peers_sink.came.size() < kFrames + 4) {
    link.pump(sink);
    peer.pump(peers_sink);
  }
  // Only frames that the path had pulled earlier are ahead of them, and each kind keeps its order.
  const auto& came = peers_sink.came;
  std::vector<FrameType> others;
  uint32_t n_bulk = 0, n_ahead = 0;
  for (const auto& one : came) {
    const bool bulk = one.payload.size() == payload.size();
    if (bulk) CHECK_EQ(one.header.segment, n_bulk++);
    if (!bulk) others.push_back(one.header.type);
    if (!bulk && others.size() == 1) n_ahead = n_bulk;
  }
  CHECK(n_ahead < kFrames / 2);
  CHECK((others ==
         std::vector{FrameType::kGrant, FrameType::kPost, FrameType::kData, FrameType::kGoodbye}));
  CHECK(came.back().header.type == FrameType::kGoodbye);
}

// Accepts what the test allows, and reports that a little is enough.
class NarrowPipe final : public Pipe {
 public:
  ssize_t write(const iovec* vectors, size_t n_vectors) override {
    size_t n_taken = 0;
    for (const iovec* one = vectors; one < vectors + n_vectors; ++one) {
      const auto* from = static_cast<const std::byte*>(one->iov_base);
      const size_t step = std::min(one->iov_len, room - std::min(room, taken.size()));
      taken.insert(taken.end(), from, from + step);
      n_taken += step;
    }
    errno = EAGAIN;
    return n_taken > 0 ? static_cast<ssize_t>(n_taken) : -1;
  }
  ssize_t read(const iovec*, size_t) override {
    errno = EAGAIN;
    return -1;
  }
  void end(bool) override {}
  size_t appetite() const override { return 32u << 10; }

  Bytes taken;
  size_t room = 1000;
};

TEST("small data waits for at most one bulk frame where the pipe takes less than one at once") {
  auto made = std::make_unique<NarrowPipe>();
  NarrowPipe& pipe = *made;
  TcpLink link(1, 1, keys_of(0, 1));
  CHECK(link.add_path(0, std::move(made), {}));
  Recorder sink;
  FakeRandom random(9);
  const Bytes payload = random_bytes(random, 128 << 10), small = random_bytes(random, 4);
  for (uint32_t number = 0; number < 8; ++number)
    link.send(data_frame(payload, number, number + 1));
  link.flush(sink);
  link.send(data_frame(small, 8));
  pipe.room = SIZE_MAX;
  link.flush(sink);
  size_t at = 0;
  std::vector<uint32_t> lengths;
  for (Header header; at < pipe.taken.size(); at += sizeof(Header) + header.length) {
    std::memcpy(&header, pipe.taken.data() + at, sizeof(Header));
    lengths.push_back(header.length);
  }
  CHECK_EQ(lengths.size(), 9u);
  CHECK_EQ(lengths[1], small.size());
}

TEST("over TCP a payload written to in flight is its owner's fault, and the error says so") {
  TcpPair pair({unix_sockets()});
  Bytes payload(4u << 20, std::byte{1});  // more than a socket takes at once
  Frame frame;
  frame.header.type = FrameType::kData;
  frame.header.length = static_cast<uint32_t>(payload.size());
  frame.payload = payload.data();
  frame.token = 5;
  CHECK(!pair.link(0).send(frame));
  pair.pump(0);
  payload.back() = std::byte{2};  // not sent yet
  CHECK(pair.run([&] { return pair.sink(1).is_over; }));
  Frame word;  // as the engine gives its peer up
  word.header.type = FrameType::kLost;
  pair.link(1).send(word);
  pair.link(1).flush(pair.sink(1));
  CHECK(pair.run([&] { return pair.sink(0).came.size() == 1; }));
  CHECK_EQ(pair.sink(0).n_spoiled[5], 1);
  CHECK_EQ(pair.sink(0).n_sent[5], 0);
  CHECK(has(pair.sink(1).why.text, "its program wrote to the memory of a call in flight"));
}

TEST("over TCP an announced end is read after all data before it, however much") {
  for (const bool announced : {false, true}) {
    const auto [near, far] = unix_sockets();
    const auto link_owned = link_over(1, {near}, keys_of(0, 1));
    TcpLink& link = *link_owned;
    Recorder sink;
    sink.expected_peer = 1;
    {
      const auto peer_owned = link_over(0, {far}, keys_of(1, 0));
      TcpLink& peer = *peer_owned;
      Recorder peers_sink;
      peer.send(Frame{});
      peer.flush(peers_sink);
    }
    link.on_event(sink, announced);
    while (!link.is_drained()) link.on_event(sink, false);
    CHECK_EQ(sink.came.size(), size_t{1});
    CHECK_EQ(sink.is_over, announced);  // otherwise the next pump would notice it
  }
}

}  // namespace
// ---- congestion control

TEST("between near hosts BBR is replaced by cubic or reno, and other algorithms are kept") {
  std::ifstream allowed("/proc/sys/net/ipv4/tcp_allowed_congestion_control");
  int n_tried = 0;
  for (std::string own; allowed >> own; ++n_tried) {
    const auto fds = tcp_sockets();
    CHECK_EQ(setsockopt(fds[0], IPPROTO_TCP, TCP_CONGESTION, own.data(), own.size()), 0);
    const SocketPipe pipe(fds[0]);
    char name[16] = {};
    socklen_t length = sizeof(name);
    CHECK_EQ(getsockopt(fds[0], IPPROTO_TCP, TCP_CONGESTION, name, &length), 0);
    const std::string now(name);
    CHECK(own == "bbr" ? now == "cubic" || now == "reno" : now == own);
    close(fds[1]);
  }
  CHECK(n_tried > 0);
}

}  // namespace shoal::test
