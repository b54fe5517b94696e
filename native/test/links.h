// Two connected ends of a link, and a sink that records what arrived: for the tests of links.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "test/check.h"
#include "test/fake_link.h"
#include "test/sockets.h"
#include "transport/socket_pipe.h"
#include "transport/tcp_link.h"

namespace shoal::test {

using Bytes = std::vector<std::byte>;

inline constexpr uint64_t kEpoch = 77;

// For the frames that `rank` exchanges with `peer`.
inline FrameKeys keys_of(int rank, int peer, uint64_t epoch = kEpoch,
                         std::string_view job_key = "the key of the tests") {
  return {std::as_bytes(std::span(job_key)), epoch, rank, peer};
}

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline Bytes random_bytes(FakeRandom& random, size_t n_bytes) {
  Bytes bytes(n_bytes);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random.next());
  return bytes;
}

// Records what arrived, and checks that the link calls only when it may.
class Recorder final : public FrameSink {
 public:
  struct Came {
    Header header;
    Bytes payload;
  };

  std::span<std::byte> receive_buffer(int peer, const Header& header) override {
    check_post_notice(peer);
    CHECK(header.length > 0);
    CHECK(header.length <= Header::kMaxPayload);
    n_receive_buffers++;
    if (refuses) return {};
    if (std::exchange(lacks_memory, false)) throw std::bad_alloc();
    last_path = header.path();
    last_header = header;
    memory() = std::make_unique<std::byte[]>(header.length);
    return {memory().get(), header.length};
  }
  void arrived(int peer, const Header& header, std::span<std::byte> payload) override {
    check_post_notice(peer);
    CHECK_EQ(payload.size(), header.length);
    came.push_back({header, Bytes(payload.begin(), payload.end())});
    if (on_arrived) on_arrived(header);
  }
  void sent(int peer, uint64_t token) override {
    check_post_notice(peer);
    CHECK(token != 0);
    n_sent[token]++;
    if (on_sent) on_sent(token);
  }
  void spoiled(int peer, uint64_t token) override {
    check_post_notice(peer);
    n_spoiled[token]++;
  }
  void moved(int peer, uint64_t token, Moved how) override {
    check_post_notice(peer);
    CHECK(how == Moved::kDone || how == Moved::kStale);
    CHECK(came_of.emplace(token, how).second);
  }
  void released(int peer, uint64_t token) override {
    check_post_notice(peer);
    n_released[token]++;
    if (on_released) on_released(token);
  }
  void broken(int peer, const Error& error) override {
    check_post_notice(peer);
    why = error;
    is_over = true;
  }
  void check_post_notice(int peer) const {
    CHECK_EQ(peer, expected_peer);
    CHECK(!is_over);
  }

  int expected_peer = 0;
  std::vector<Came> came;
  std::map<uint64_t, int> n_sent, n_spoiled, n_released;
  std::map<uint64_t, Moved> came_of;  // of completed puts and gets
  Error why;
  bool is_over = false;  // broken, or closed by the test: no more calls are allowed
  int n_receive_buffers = 0;
  bool refuses = false;
  bool lacks_memory = false;  // the next allocation fails
  std::unique_ptr<std::byte[]>& memory() {
    return receive_buffers[last_path];
  }  // of the last receive buffer
  std::array<std::unique_ptr<std::byte[]>, Header::kMaxPaths> receive_buffers;
  uint32_t last_path = 0;
  Header last_header;
  std::function<void(const Header&)> on_arrived;
  std::function<void(uint64_t)> on_sent, on_released;
};

// Two connected ends of one kind of link. End 0 talks to peer 1 and vice versa.
struct Pair {
  virtual ~Pair() = default;
  // Acts as the progress thread when a descriptor is ready. True if anything moved.
  virtual bool pump(int end) {
    return links[static_cast<size_t>(end)]->pump(sinks[static_cast<size_t>(end)]);
  }
  // Waits, if the medium works in the background, as loopback does: a moment is enough. False if
  // there is nothing to wait for.
  virtual bool wait() {
    std::vector<pollfd> fds;
    for (const auto& link : links)
      if (link)
        for (const int fd : link->fds()) fds.push_back({fd, POLLIN, 0});
    return !fds.empty() && poll(fds.data(), fds.size(), 1) > 0;
  }

  Pair() {
    sinks[0].expected_peer = 1;
    sinks[1].expected_peer = 0;
  }
  Link& link(int end) { return *links[static_cast<size_t>(end)]; }
  Recorder& sink(int end) { return sinks[static_cast<size_t>(end)]; }
  template <class Until>
  bool run(Until until) {
    for (int n_idle = 0; n_idle < 50 && !until();) {
      bool moved = pump(0);
      moved |= pump(1);
      if (!moved && !until() && !wait()) n_idle++;
      if (moved) n_idle = 0;
    }
    return until();
  }
  void settle() {
    run([] { return false; });
  }
  // The outcome of all pending moves, after a wait.
  Moved put(int end, const Bytes& from, const Remote& to) {
    const uint64_t token = next_token++;
    return ended(end, token, link(end).put(token, {}, from.data(), from.size(), to));
  }
  Moved get(int end, const Remote& from, const Into& into) {
    const uint64_t token = next_token++;
    return ended(end, token, link(end).get(token, {}, from, into));
  }
  void release(int end, const CallId& call) {
    const uint64_t token = next_token++;
    if (link(end).release(token, call)) return;
    CHECK(run([&] { return sink(end).n_released[token] > 0; }));
    CHECK_EQ(sink(end).n_released[token], 1);
  }

  std::array<std::unique_ptr<Link>, 2> links;
  std::array<Recorder, 2> sinks;
  uint64_t next_token = 1u << 20;

 private:
  Moved ended(int end, uint64_t token, Moved how) {
    CHECK_EQ(sink(end).came_of.count(token), 0u);
    if (how != Moved::kLater) return how;
    CHECK(run([&] { return sink(end).came_of.count(token) > 0; }));
    return sink(end).came_of[token];
  }
};

struct FakePair final : Pair {
  explicit FakePair(const FakeNet::Options& options) : net(2, options) {
    for (const int end : {0, 1}) links[static_cast<size_t>(end)] = net.link(end, 1 - end);
  }
  ~FakePair() override { links = {}; }
  bool pump(int end) override {
    net.step();
    if (net.options.longest_remake > 0) link(end).look(sink(end), ++n_steps * kMillisecond);
    return Pair::pump(end);
  }

  FakeNet net;
  int64_t n_steps = 0;
};

// Of connections that have proved the key.
inline std::unique_ptr<TcpLink> link_over(int peer, const std::vector<int>& fds, FrameKeys keys) {
  auto link = std::make_unique<TcpLink>(peer, fds.size(), std::move(keys));
  for (size_t path = 0; path < fds.size(); ++path)
    CHECK(link->add_path(path, std::make_unique<SocketPipe>(fds[path]), {}));
  return link;
}

struct TcpPair final : Pair {
  explicit TcpPair(const std::vector<std::array<int, 2>>& paths) {
    for (const int end : {0, 1}) {
      std::vector<int> fds;
      for (const auto& path : paths) fds.push_back(path[static_cast<size_t>(end)]);
      links[static_cast<size_t>(end)] = link_over(1 - end, fds, keys_of(end, 1 - end));
    }
  }
};

inline FakeNet::Options fake_options() {
  FakeNet::Options options;
  options.epoch = kEpoch;
  return options;
}

inline Frame data_frame(const Bytes& payload, uint32_t number, uint64_t token = 0) {
  Frame frame;
  frame.header.type = FrameType::kData;
  frame.header.group = 3;
  frame.header.key = 1000 + number;
  frame.header.descriptor = ~number;
  frame.header.subject = number ^ 0x5555;
  frame.header.flow = number % 7;
  frame.header.segment = number;
  frame.header.flags = kEager;
  frame.header.length = static_cast<uint32_t>(payload.size());
  frame.payload = payload.data();
  frame.is_lent_by_call = true;
  frame.token = token;
  return frame;
}

inline void check_came(const Recorder::Came& came, const Bytes& payload, uint32_t number) {
  CHECK(came.header.type == FrameType::kData);
  CHECK_EQ(came.header.group, 3u);
  CHECK_EQ(came.header.key, 1000u + number);
  CHECK_EQ(came.header.descriptor, ~number);
  CHECK_EQ(came.header.subject, number ^ 0x5555);
  CHECK_EQ(came.header.flow, number % 7);
  CHECK_EQ(came.header.segment, number);
  Header by_path_0 = came.header;
  by_path_0.set_path(0);
  CHECK_EQ(by_path_0.flags, kEager);
  CHECK(came.payload == payload);
}

// A TcpLink whose input the test writes.
struct Stream {
  Stream() {
    const auto fds = unix_sockets();
    raw = fds[0];
    link = link_over(0, {fds[1]}, keys_of(1, 0));
  }
  ~Stream() { close(raw); }
  void write(const void* bytes, size_t n_bytes) {
    CHECK_EQ(send(raw, bytes, n_bytes, MSG_NOSIGNAL), static_cast<ssize_t>(n_bytes));
    for (int n = 0; n < 4 && !sink.is_over; ++n) link->pump(sink);
  }

  // Sealed as the peer's frame `place` on the connection, with the frame's own number on the link.
  void write_sealed(Header header, uint64_t place = 0) {
    const uint64_t sequence = header.type == FrameType::kAck ? 0 : header.sequence;
    header.seal = keys_of(0, 1).out(0).of(header, {place, sequence, header.acknowledged});
    write(&header, sizeof(header));
  }

  int raw;
  std::unique_ptr<TcpLink> link;
  Recorder sink;
};

// The bytes that a TcpLink writes for frames.
inline Bytes bytes_of(const std::vector<Frame>& frames) {
  const auto fds = unix_sockets();
  const auto link = link_over(1, {fds[0]}, keys_of(0, 1));
  Recorder sink;
  sink.expected_peer = 1;
  size_t n_bytes = 0;
  for (const Frame& frame : frames) {
    link->send(frame);
    n_bytes += sizeof(Header) + frame.header.length;
  }
  link->flush(sink);
  Bytes bytes(n_bytes);
  CHECK_EQ(recv(fds[1], bytes.data(), bytes.size(), MSG_WAITALL),
           static_cast<ssize_t>(bytes.size()));
  close(fds[1]);
  return bytes;
}

}  // namespace shoal::test
