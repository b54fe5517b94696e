// Endpoints of one process over real sockets, with a clock moved by hand where time matters.
#include <fcntl.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <random>
#include <string>
#include <utility>

#include "base/clock.h"
#include "test/check.h"
#include "test/hex.h"
#include "test/sockets.h"
#include "transport/endpoint.h"

namespace shoal::test {
namespace {

constexpr uint16_t kWord = 100, kPassing = 101, kLong = 102;
constexpr size_t kMostWord = 64, kMostLong = 8 << 20;

Secret key(char of = 'k') { return Secret(bytes(std::string(32, of))); }

std::vector<std::byte> drawn(size_t n, uint64_t seed = 1) {
  std::mt19937_64 draw(seed);
  std::vector<std::byte> all(n);
  for (std::byte& one : all) one = static_cast<std::byte>(draw());
  return all;
}

std::string text(const Frame& frame) {
  return {reinterpret_cast<const char*>(frame.body.data()), frame.body.size()};
}

size_t n_open() {
  size_t n = 0;
  for (int fd = 0; fd < 1024; ++fd) n += fcntl(fd, F_GETFD) != -1;
  return n;
}

// A listener in the abstract namespace, and its name.
int listen_abstract(const std::string& name, int backlog = 64) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const Address at = Address::abstract(name);
  CHECK_EQ(bind(fd, reinterpret_cast<const sockaddr*>(&at.at), at.length), 0);
  CHECK_EQ(listen(fd, backlog), 0);
  return fd;
}

int call(const Address& at) {
  const int fd = socket(at.at.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK_EQ(connect(fd, reinterpret_cast<const sockaddr*>(&at.at), at.length), 0);
  return fd;
}

// True once the other end has closed; earlier bytes are discarded.
bool is_closed(int fd) {
  char room[256];
  ssize_t n = 0;
  while ((n = recv(fd, room, sizeof(room), MSG_DONTWAIT)) > 0) {
  }
  return n == 0 || errno == ECONNRESET;
}

// One process: an endpoint, and the events that it reported.
struct Host final : Endpoint::Owner {
  explicit Host(Endpoint::Options options = {}, char key_of = 'k')
      : key_of(key_of), end(*this, std::move(options)) {}

  std::variant<Secret, Progress> judge(const Hello& hello) override {
    if (on_judge) std::exchange(on_judge, nullptr)();
    if (hello.to_rank != 0) return Progress::kRefused;
    if (hello.epoch != 7) return Progress::kStale;
    return key(key_of);
  }
  void welcome(const Endpoint::PeerPtr& peer, const Hello& hello) override {
    hellos.push_back(hello);
    add(peer);
  }
  void key_differs(const Hello& hello) override { differing.push_back(hello); }
  void take_stranger(int fd) override { strangers.push_back(fd); }
  void turned_away(uint64_t n, const std::string& caller) override {
    n_turned_away = n;
    last_turned_away = caller;
  }
  void reached(const Endpoint::PeerPtr& peer, uint64_t dial) override {
    dials.push_back(dial);
    add(peer);
  }
  void not_reached(const Connector::Failure& failure) override {
    failures.push_back(failure);
    if (on_not_reached) std::exchange(on_not_reached, nullptr)();
  }
  void received(const Endpoint::PeerPtr& peer, Frame frame) override {
    if (closes_on_frame) peer->close();
    frames.push_back(std::move(frame));
  }
  void lost(const Endpoint::PeerPtr&, int error, const std::string& why) override {
    losses.push_back(why);
    errors.push_back(error);
  }
  void add(const Endpoint::PeerPtr& peer) {
    peer->expect(kWord, kMostWord);
    peer->expect(kPassing, 0, true);
    peer->expect(kLong, kMostLong);
    peers.push_back(peer);
  }
  Peer& peer() { return *peers.back(); }

  char key_of;
  bool closes_on_frame = false;
  std::function<void()> on_judge, on_not_reached;  // called once
  std::vector<Hello> hellos, differing;
  std::vector<int> strangers, errors;
  std::vector<uint64_t> dials;
  std::vector<Connector::Failure> failures;
  std::vector<Frame> frames;
  std::vector<std::string> losses;
  std::vector<Endpoint::PeerPtr> peers;
  uint64_t n_turned_away = 0;
  std::string last_turned_away;
  Endpoint end;
};

// Steps both until the condition holds; at most ten seconds.
template <class Done>
bool until(std::initializer_list<Host*> hosts, Done done) {
  const int64_t most = now_ns() + 10 * kSecond;
  while (!done() && now_ns() < most) {
    for (Host* host : hosts) host->end.step(now_ns());
  }
  return done();
}

// A called host and a caller, connected.
struct Pair {
  explicit Pair(bool is_local = true, Endpoint::Options options = {})
      : called(options), caller(options) {
    static int n_pairs = 0;
    const std::string name =
        "shoal-test-" + std::to_string(getpid()) + "-" + std::to_string(n_pairs++);
    const int listener = is_local ? listen_abstract(name) : listen_on_loopback();
    const Address at = is_local ? Address::abstract(name) : address_of(listener);
    called.end.listen(listener);
    caller.end.connect(at, {7, 3, 0, 0}, key());
    CHECK(
        until({&called, &caller}, [&] { return !called.peers.empty() && !caller.peers.empty(); }));
  }
  template <class Done>
  bool run(Done done) {
    return until({&called, &caller}, done);
  }

  Host called, caller;
};

// The raw ends of a peer: one end that speaks frames, and one that a liar writes.
struct Raw {
  explicit Raw(size_t most_queued = 1 << 20, int64_t patience_ns = Peer::kPatient) {
    epoll = epoll_create1(EPOLL_CLOEXEC);
    const auto fds = unix_sockets();
    for (const int fd : fds) fcntl(fd, F_SETFL, O_NONBLOCK);
    far = fds[1];
    peer = std::make_unique<Peer>(epoll, 1, fds[0], key('s'), false, most_queued, patience_ns);
    peer->expect(kWord, kMostWord);
  }
  ~Raw() {
    peer.reset();
    for (const int fd : {far, epoll}) close(fd);
  }
  // The same bytes that a peer with this session would write.
  std::vector<std::byte> written(bool by_caller, uint16_t kind, const std::string& body,
                                 int n_before = 0) {
    const auto fds = unix_sockets();
    for (const int fd : fds) fcntl(fd, F_SETFL, O_NONBLOCK);
    Peer writer(epoll, 2, fds[0], key('s'), by_caller, 1 << 20);
    std::vector<std::byte> all(4096);
    ssize_t n = 0;
    for (int at = 0; at <= n_before; ++at) {
      CHECK(writer.send(kind, bytes(body)));
      n = recv(fds[1], all.data(), all.size(), 0);
    }
    all.resize(static_cast<size_t>(n));
    close(fds[1]);
    return all;
  }
  void send(Bytes data) {
    CHECK_EQ(::send(far, data.data(), data.size(), MSG_NOSIGNAL), data.size());
  }
  std::optional<Frame> step() { return peer->step(now_ns(), false); }

  int epoll = -1, far = -1;
  std::unique_ptr<Peer> peer;
};

}  // namespace

TEST("two endpoints meet and exchange messages in order on either kind of socket") {
  for (const bool is_local : {true, false}) {
    Pair pair(is_local);
    CHECK(pair.called.hellos == std::vector<Hello>{{7, 3, 0, 0}});
    CHECK_EQ(pair.caller.dials.size(), 1u);
    CHECK_EQ(pair.called.peer().is_local(), is_local);
    for (const std::string word : {"one", "two", ""}) {
      CHECK(pair.called.peer().send(kWord, bytes(word)));
      CHECK(pair.caller.peer().send(kWord, bytes(word + "!")));
    }
    CHECK(pair.run([&] { return pair.called.frames.size() + pair.caller.frames.size() == 6; }));
    CHECK_EQ(text(pair.caller.frames[0]), "one");
    CHECK(pair.caller.frames[2].body.empty());
    CHECK_EQ(text(pair.called.frames[1]), "two!");
    CHECK_EQ(pair.called.end.n_pending(), 0u);
  }
}

TEST("a message far larger than the socket's buffer arrives whole while the peer reads") {
  Pair pair(true, {.most_queued = 16 << 20});
  const auto body = drawn(kMostLong);
  CHECK(pair.called.peer().send(kLong, body));
  CHECK(pair.called.peer().n_queued() > 0);
  CHECK(pair.run([&] { return !pair.caller.frames.empty(); }));
  CHECK(pair.caller.frames[0].body == body);
  CHECK_EQ(pair.called.peer().n_queued(), 0u);
}

TEST("a descriptor is passed once, with close-on-exec, and the receiver owns it") {
  const size_t before = n_open();
  {
    Pair pair;
    const int file = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK(pair.called.peer().send(kPassing, {}, file));
    close(file);
    CHECK(pair.run([&] { return !pair.caller.frames.empty(); }));
    const int fd = pair.caller.frames[0].fd;
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    close(fd);
  }
  CHECK_EQ(n_open(), before);
}

TEST("the sender may close a descriptor that still waits for room") {
  const size_t before = n_open();
  {
    Pair pair(true, {.most_queued = 16 << 20});
    CHECK(pair.called.peer().send(kLong, drawn(kMostLong)));
    const int file = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK(pair.called.peer().send(kPassing, {}, file));
    close(file);
    CHECK(pair.run([&] { return pair.caller.frames.size() == 2; }));
    CHECK_EQ(pair.caller.frames[0].fd, -1);
    CHECK(pair.caller.frames[1].fd >= 0);
    close(pair.caller.frames[1].fd);
    CHECK(pair.called.peer().send(kLong, drawn(kMostLong)));
    CHECK(pair.called.peer().send(kPassing, {}, 0));  // goes with the connection
  }
  CHECK_EQ(n_open(), before);
}

TEST("a descriptor sent with the wrong kind of message is closed, and the connection ends") {
  const size_t before = n_open();
  {
    Pair pair;
    CHECK(pair.called.peer().send(kWord, bytes("with one"), 0));
    CHECK(pair.run([&] { return !pair.caller.losses.empty(); }));
    CHECK_EQ(pair.caller.losses[0], "it spoke out of turn");
    CHECK(pair.caller.frames.empty());
  }
  CHECK_EQ(n_open(), before);
}

TEST("changing any bit of a frame ends the connection") {
  const size_t n_bytes = Raw().written(true, kWord, "a word").size();
  for (size_t bit = 0; bit < 8 * n_bytes; ++bit) {
    Raw raw;
    auto frame = raw.written(true, kWord, "a word");
    frame[bit / 8] ^= std::byte(1u << bit % 8);
    raw.send(frame);
    shutdown(raw.far, SHUT_WR);  // a changed length waits for bytes that never arrive
    CHECK(!raw.step());
    CHECK(raw.peer->is_lost());
  }
}

TEST("a frame is delivered whole however it is cut, and no part of it before its end") {
  Raw raw;
  const auto frame = raw.written(true, kWord, "a word");
  for (size_t at = 0; at < frame.size(); ++at) {
    raw.send(Bytes(frame).subspan(at, 1));
    const auto found = raw.step();
    CHECK_EQ(found.has_value(), at + 1 == frame.size());
  }
  CHECK(!raw.peer->is_lost());
}

TEST("a frame that is repeated, left out, reflected or from another connection ends this one") {
  const auto refused = [](const std::vector<std::byte>& first, const std::vector<std::byte>& second,
                          size_t n_good) {
    Raw raw;
    raw.send(first);
    CHECK_EQ(raw.step().has_value(), n_good == 1);
    if (!second.empty()) {
      raw.send(second);
      CHECK(!raw.step());
    }
    CHECK_EQ(raw.peer->why(), "its message was damaged in transit");
  };
  Raw source;
  const auto first = source.written(true, kWord, "one"),
             second = source.written(true, kWord, "x", 1);
  refused(first, first, 1);
  refused(second, {}, 0);
  refused(source.written(false, kWord, "one"), {}, 0);
  Pair pair;
  CHECK(pair.caller.peer().send(kWord, bytes("one")));
  std::vector<std::byte> other(4096);
  const int fd = dup(pair.called.peer().fd());
  const ssize_t n = recv(fd, other.data(), other.size(), 0);
  close(fd);
  other.resize(static_cast<size_t>(n));
  refused(other, {}, 0);
}

TEST("a length above its kind's limit ends the connection before any payload is read") {
  Raw raw;
  raw.send(Bytes(raw.written(true, kWord, std::string(kMostWord + 1, 'x'))).first(16));
  CHECK(!raw.step());
  CHECK_EQ(raw.peer->why(), "it announced a message of 65 bytes");
  Raw unknown;
  unknown.send(unknown.written(true, kLong, "x"));
  CHECK(!unknown.step());
  CHECK_EQ(unknown.peer->why(), "it spoke out of turn");
}

TEST("a connection that ends at any byte of a frame is lost, and so is the frame") {
  const auto whole = Raw().written(true, kWord, "a word");
  for (size_t n = 0; n < whole.size(); ++n) {
    Raw raw;
    raw.send(Bytes(whole).first(n));
    shutdown(raw.far, SHUT_WR);
    CHECK(!raw.step());
    CHECK_EQ(raw.peer->why(), "it closed the connection");
  }
}

TEST("a peer that dies after it sent a message is lost after the message was received") {
  Pair pair;
  CHECK(pair.caller.peer().send(kWord, bytes("last")));
  pair.caller.end.close();
  CHECK(until({&pair.called}, [&] { return !pair.called.losses.empty(); }));
  CHECK_EQ(pair.called.frames.size(), 1u);
  CHECK_EQ(pair.called.losses.size(), 1u);
  CHECK(!pair.called.peer().send(kWord, {}));
}

TEST("the kernel probes an idle peer and gives up a vanished machine within a minute") {
  Pair pair(false);
  const auto option = [&](int level, int name) {
    int value = 0;
    socklen_t n_bytes = sizeof(value);
    CHECK_EQ(getsockopt(pair.called.peer().fd(), level, name, &value, &n_bytes), 0);
    return value;
  };
  CHECK_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
  const int after_s = option(IPPROTO_TCP, TCP_KEEPIDLE);
  const int unanswered_s = option(IPPROTO_TCP, TCP_KEEPINTVL) * option(IPPROTO_TCP, TCP_KEEPCNT);
  CHECK(after_s + unanswered_s <= 60);
}

TEST("nothing is read or reported after a peer was closed, even from its message's callback") {
  Pair pair;
  pair.called.closes_on_frame = true;
  for (int n = 0; n < 3; ++n) pair.caller.peer().send(kWord, bytes("x"));
  CHECK(pair.run([&] { return !pair.caller.losses.empty(); }));
  CHECK_EQ(pair.called.frames.size(), 1u);
  CHECK(pair.called.losses.empty());
}

TEST("a full outbox ends the connection, and its owner learns of it by the next step") {
  Pair pair(true, {.most_queued = 100'000});
  size_t n_sent = 0;
  while (n_sent < 10'000 && pair.called.peer().send(kLong, drawn(50'000))) ++n_sent;
  CHECK(n_sent > 0 && n_sent < 10'000);
  CHECK(pair.called.losses.empty());
  pollfd ready{pair.called.end.fd(), POLLIN, 0};
  CHECK_EQ(poll(&ready, 1, 5000), 1);
  CHECK(until({&pair.called}, [&] { return !pair.called.losses.empty(); }));
  CHECK_EQ(pair.called.errors[0], ENOBUFS);
  CHECK_EQ(pair.called.losses.size(), 1u);
}

TEST("a message that stalls half way ends the connection, and one that makes progress does not") {
  const auto whole = Raw().written(true, kWord, "a word");
  Raw raw(1 << 20, kSecond);
  int64_t now = now_ns();
  CHECK_EQ(raw.peer->deadline(), INT64_MAX);  // between messages it may be silent
  for (const std::byte& one : Bytes(whole).first(whole.size() - 1)) {
    raw.send(Bytes(&one, 1));
    CHECK(!raw.peer->step(now, false));
    CHECK_EQ(raw.peer->deadline(), now + kSecond);
    now += kSecond - 1;
  }
  raw.peer->pause(true);  // it is not read, so it gets no blame
  raw.peer->step(now + kSecond, false);
  raw.peer->pause(false);
  CHECK(!raw.peer->is_lost());
  raw.send(Bytes(whole).last(1));
  CHECK(raw.peer->step(now, false).has_value());
  raw.peer->step(now, false);
  CHECK_EQ(raw.peer->deadline(), INT64_MAX);
  raw.send(Bytes(whole).first(1));
  raw.peer->step(now, false);
  raw.peer->step(now + kSecond - 1, false);
  CHECK(!raw.peer->is_lost());
  raw.peer->step(now + kSecond, false);
  CHECK_EQ(raw.peer->why(), "stopped in the middle of a message");

  Raw unread(16 << 20, kSecond);
  CHECK(unread.peer->send(kLong, drawn(kMostLong)));
  now = unread.peer->deadline();
  CHECK(now < now_ns() + 2 * kSecond);
  unread.peer->step(now - 1, false);
  CHECK(!unread.peer->is_lost());
  std::vector<std::byte> room(1 << 20);
  CHECK(recv(unread.far, room.data(), room.size(), 0) > 0);
  unread.peer->step(now, false);
  CHECK_EQ(unread.peer->deadline(), now + kSecond);
  unread.peer->step(now + kSecond, false);
  CHECK_EQ(unread.peer->why(), "stopped in the middle of a message");
}

TEST("a paused peer is read again when resumed, and its end is noticed meanwhile") {
  Pair pair;
  pair.called.peer().pause(true);
  CHECK(pair.caller.peer().send(kWord, bytes("x")));
  for (int n = 0; n < 5; ++n) pair.called.end.step(now_ns());
  CHECK(pair.called.frames.empty());
  pair.called.peer().pause(false);
  CHECK(pair.run([&] { return pair.called.frames.size() == 1; }));
  pair.called.peer().pause(true);
  pair.caller.peer().close();
  CHECK(pair.run([&] { return !pair.called.losses.empty(); }));
}

TEST("a caller without the key is notified each time, and both sides record it") {
  Host called, caller;
  const int listener = listen_on_loopback();
  const Address at = address_of(listener);
  called.end.listen(listener);
  const uint64_t dial = caller.end.connect(at, {7, 3, 0, 0}, key('x'));
  CHECK(until({&called, &caller}, [&] { return caller.failures.size() > 1; }));
  CHECK(caller.failures[0].progress == Progress::kKeyDiffers);
  CHECK(called.differing[0] == (Hello{7, 3, 0, 0}));
  caller.end.hang_up(dial);
  const size_t n = caller.failures.size();
  caller.end.step(now_ns() + 10 * kSecond);
  CHECK_EQ(caller.failures.size(), n);
  CHECK_EQ(caller.end.deadline(), Endpoint::kNever);
}

TEST("a caller of another epoch is stale, and one for another rank gets no reply") {
  Host called, caller;
  const int listener = listen_on_loopback();
  const Address at = address_of(listener);
  called.end.listen(listener);
  const uint64_t stale = caller.end.connect(at, {8, 3, 0, 0}, key());
  CHECK(until({&called, &caller}, [&] { return !caller.failures.empty(); }));
  CHECK(caller.failures[0].progress == Progress::kStale);
  caller.end.hang_up(stale);
  caller.failures.clear();
  caller.end.connect(at, {7, 3, 5, 0}, key());
  CHECK(until({&called, &caller}, [&] { return !caller.failures.empty(); }));
  CHECK_EQ(caller.failures[0].error, ECONNRESET);
  CHECK(caller.failures[0].was_connected);
  CHECK(called.peers.empty() && caller.peers.empty());
}

TEST("a caller is accepted as soon as someone listens, and a full backlog only delays it") {
  const std::string name = "shoal-late-" + std::to_string(getpid());
  Host called, caller, other;
  caller.end.connect(Address::abstract(name), {7, 1, 0, 0}, key());
  CHECK(until({&caller}, [&] { return !caller.failures.empty(); }));
  CHECK_EQ(caller.failures[0].error, ECONNREFUSED);
  const int listener = listen_abstract(name, 0);
  std::vector<int> waiting{call(Address::abstract(name))};
  other.end.connect(Address::abstract(name), {7, 2, 0, 0}, key());
  CHECK(until({&other}, [&] { return !other.failures.empty() || !other.peers.empty(); }));
  CHECK_EQ(other.failures[0].error, EAGAIN);
  called.end.listen(listener);
  CHECK(until({&called, &caller, &other}, [&] { return called.peers.size() == 2; }));
  for (const int fd : waiting) close(fd);
}

TEST("a dial without an answer times out and is repeated") {
  const int listener = listen_on_loopback();
  Host caller({.dial_ns = kSecond});
  caller.end.connect(address_of(listener), {7, 1, 0, 0}, key());
  const int64_t start = now_ns();
  caller.end.step(start);
  caller.end.step(start);
  CHECK(caller.end.deadline() <= start + kSecond);
  caller.end.step(start + kSecond);
  CHECK_EQ(caller.failures.size(), 1u);
  CHECK_EQ(caller.failures[0].error, ETIMEDOUT);
  close(listener);
}

TEST("an address may name its interface, and nothing else is accepted") {
  const auto scope = [](const char* text) {
    const Address address = Address::of(text, 7);
    CHECK_EQ(address.at.ss_family, AF_INET6);
    return reinterpret_cast<const sockaddr_in6*>(&address.at)->sin6_scope_id;
  };
  CHECK_EQ(scope("fe80::1%lo"), if_nametoindex("lo"));
  CHECK_EQ(scope("fe80::1%7"), 7u);
  CHECK_EQ(scope("fd00::2"), 0u);
  for (const char* text : {"", "localhost", "1.2.3", "10.0.0.1%lo"})
    CHECK_EQ(Address::of(text, 7).length, 0u);
  CHECK_EQ(Address::abstract(std::string(107, 'x')).length, sizeof(sockaddr_un));
  CHECK_EQ(Address::abstract(std::string(108, 'x')).length, 0u);
}

TEST("a silent caller is closed at its deadline, and valid bytes do not extend it") {
  Host called({.pending_ns = 2 * kSecond});
  const int listener = listen_on_loopback();
  const Address at = address_of(listener);
  called.end.listen(listener);
  const int first = call(at);
  called.end.step(0);
  const int second = call(at);
  CHECK_EQ(send(second, "shoal", 5, 0), 5);
  called.end.step(kSecond);
  CHECK_EQ(called.end.n_pending(), 2u);
  CHECK_EQ(called.end.deadline(), 2 * kSecond);
  called.end.step(2 * kSecond);
  CHECK(is_closed(first) && !is_closed(second));
  CHECK_EQ(called.end.deadline(), 3 * kSecond);
  called.end.step(3 * kSecond);
  CHECK(is_closed(second));
  CHECK_EQ(called.end.deadline(), Endpoint::kNever);
  for (const int fd : {first, second}) close(fd);
}

TEST("a holder of the key gets in past any number of silent callers, and garbage gets no reply") {
  Host called, caller;
  const int listener = listen_on_loopback();
  const Address at = address_of(listener);
  called.end.listen(listener);
  std::vector<int> silent;
  for (int n = 0; n < 200; ++n) {
    silent.push_back(call(at));
    called.end.step(now_ns());
  }
  CHECK_EQ(called.end.n_pending(), Acceptor::kMostPending);
  caller.end.connect(at, {7, 3, 0, 0}, key());
  CHECK(until({&called, &caller}, [&] { return !caller.peers.empty(); }));
  for (int n = 0; n < 200 - static_cast<int>(Acceptor::kMostPending); ++n)
    CHECK(is_closed(silent[static_cast<size_t>(n)]));
  const int rude = call(at);
  CHECK_EQ(send(rude, "GET / HTTP/1.1\r\n", 16, 0), 16);
  CHECK(until({&called}, [&] { return is_closed(rude); }));
  for (const int fd : silent) close(fd);
  close(rude);
}

TEST("callers with a valid HELLO are evicted last, and a forged HELLO holds no place") {
  Host called;
  const int listener = listen_on_loopback();
  const Address at = address_of(listener);
  called.end.listen(listener);
  const auto greet = [&](uint32_t rank, char of) {
    const int fd = call(at);
    ClientHandshake hello({7, rank, 0, 0}, key(of));
    CHECK_EQ(send(fd, hello.hello().data(), hello.hello().size(), 0), hello.hello().size());
    called.end.step(now_ns());
    called.end.step(now_ns());
    return fd;
  };
  std::vector<int> greeters;
  for (uint32_t rank = 1; rank <= Acceptor::kMostPending; ++rank)
    greeters.push_back(greet(rank, 'k'));
  CHECK_EQ(called.end.n_pending(), Acceptor::kMostPending);
  const int silent = call(at);
  called.end.step(now_ns());
  CHECK(is_closed(greeters[0]) && !is_closed(greeters[1]));
  const int last = greet(999, 'k');
  CHECK(is_closed(silent) && !is_closed(greeters[1]));
  const int forger = greet(7, 'x');
  CHECK(is_closed(forger));
  CHECK_EQ(called.differing.size(), 1u);
  for (const int fd : greeters) close(fd);
  for (const int fd : {silent, last, forger}) close(fd);
}

TEST("a caller that speaks another protocol is handed over unread") {
  Host called({.beginnings = {{'G', 'E', 'T', ' '}}});
  const int listener = listen_on_loopback();
  const Address at = address_of(listener);
  called.end.listen(listener);
  const int one = call(at), other = call(at);
  CHECK_EQ(send(one, "GET /x", 6, 0), 6);
  CHECK_EQ(send(other, "POST /", 6, 0), 6);
  CHECK(until({&called}, [&] { return !called.strangers.empty() && is_closed(other); }));
  char room[6];
  CHECK_EQ(recv(called.strangers[0], room, 6, 0), 6);
  CHECK_EQ(std::string(room, 6), "GET /x");
  CHECK_EQ(called.end.n_pending(), 0u);
  for (const int fd : {one, other, called.strangers[0]}) close(fd);
}

TEST("without a descriptor callers are refused and counted, and a later one is accepted") {
  Host called;
  const std::string name = "shoal-full-" + std::to_string(getpid());
  called.end.listen(listen_abstract(name));
  std::vector<int> callers;
  for (int n = 0; n < 3; ++n) callers.push_back(call(Address::abstract(name)));
  rlimit before{};
  getrlimit(RLIMIT_NOFILE, &before);
  const int next = dup(0);
  close(next);
  const rlimit none{static_cast<rlim_t>(next), before.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  called.end.step(now_ns());
  called.end.step(now_ns());
  setrlimit(RLIMIT_NOFILE, &before);
  CHECK_EQ(called.end.n_turned_away(), 3u);
  CHECK_EQ(called.n_turned_away, 3u);
  CHECK_EQ(called.last_turned_away, "this host");
  for (const int fd : callers) CHECK(is_closed(fd));
  for (const int fd : callers) close(fd);
  Host caller;
  caller.end.connect(Address::abstract(name), {7, 3, 0, 0}, key());
  CHECK(until({&called, &caller}, [&] { return !called.peers.empty(); }));
}

TEST("an endpoint that judges a caller can be closed, stepped, forked or lose its listeners") {
  const auto judging = [](auto act) {
    Host called;
    const int listener = listen_on_loopback();
    const Address at = address_of(listener);
    called.end.listen(listener);
    std::vector<int> callers;
    for (uint32_t rank = 1; rank <= 3; ++rank) {
      callers.push_back(call(at));
      const ClientHandshake hello({7, rank, 0, 0}, key());
      CHECK_EQ(send(callers.back(), hello.hello().data(), hello.hello().size(), 0),
               hello.hello().size());
    }
    called.on_judge = [&] { act(called); };
    for (int n = 0; n < 3; ++n) called.end.step(now_ns());
    for (const int fd : callers) close(fd);
    return called.end.n_pending();
  };
  CHECK_EQ(judging([](Host& called) { called.end.close(); }), 0u);
  CHECK_EQ(judging([](Host& called) { called.end.step(now_ns()); }), 3u);
  CHECK_EQ(judging([](Host& called) { close(called.end.hand_over().at(0)); }), 1u);
  pid_t child = -1;
  const size_t n_pending = judging([&](Host&) { child = fork(); });
  if (child == 0) _exit(n_pending == 0 ? 0 : 1);
  CHECK_EQ(n_pending, 3u);
  int status = 1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

TEST("a dial that starts as another one fails is due at once") {
  Host caller;
  const int listener = listen_on_loopback();
  const Address nobody = Address::abstract("shoal-nobody-" + std::to_string(getpid()));
  const uint64_t dial = caller.end.connect(nobody, {7, 1, 0, 0}, key());
  caller.on_not_reached = [&] {
    caller.end.hang_up(dial);
    caller.end.connect(address_of(listener), {7, 1, 0, 0}, key());
  };
  const int64_t now = now_ns();
  caller.end.step(now);
  CHECK_EQ(caller.failures.size(), 1u);
  CHECK(caller.end.deadline() <= now);
  close(listener);
}

// epoll refuses files, as it refuses sockets when the kernel has no room for another one.
TEST("a connection or a listener that cannot be watched is retried") {
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  Peer peer(epoll, 1, open("/dev/null", O_RDWR | O_CLOEXEC), key('s'), false, 1 << 20);
  CHECK(peer.is_lost());
  CHECK(peer.deadline() <= now_ns());
  close(epoll);
  Host called;
  called.end.step(now_ns());
  CHECK_EQ(called.end.deadline(), Endpoint::kNever);
  called.end.listen(open("/dev/null", O_RDWR | O_CLOEXEC));
  CHECK(called.end.deadline() <= now_ns());
}

TEST("callers of a shut endpoint wait in the kernel for the next owner of its listeners") {
  Host called, caller;
  const int listener = listen_on_loopback();
  const Address at = address_of(listener);
  called.end.listen(listener);
  called.end.listen(listen_abstract("shoal-shut-" + std::to_string(getpid())));
  called.end.shut();
  const int waiting = call(at);
  for (int n = 0; n < 3; ++n) called.end.step(now_ns());
  CHECK_EQ(called.end.n_pending(), 0u);
  CHECK(called.end.hand_over() == std::vector<int>{listener});
  called.end.close();
  Host next;
  next.end.listen(listener);
  next.end.step(now_ns());
  CHECK_EQ(next.end.n_pending(), 1u);
  close(waiting);
}

TEST("closing closes every peer and can be repeated, and peers may outlive the endpoint") {
  const size_t before = n_open();
  {
    Pair pair;
    pair.called.end.close();
    pair.called.end.close();
    pair.called.end.step(now_ns());
    CHECK(!pair.called.peer().send(kWord, {}));
    CHECK_EQ(pair.called.peer().fd(), -1);
    CHECK(until({&pair.caller}, [&] { return !pair.caller.losses.empty(); }));
  }
  CHECK_EQ(n_open(), before);
}

TEST("a forked child holds no connections, and the parent's still work") {
  Pair pair;
  const int fds[] = {pair.called.end.fd(), pair.called.peer().fd(), pair.caller.peer().fd()};
  const pid_t child = fork();
  if (child == 0) {
    bool is_right = !pair.called.peer().send(kWord, bytes("of the child"));
    for (const int fd : fds) is_right &= fcntl(fd, F_GETFD) == -1;
    pair.called.end.step(now_ns());
    _exit(is_right ? 0 : 1);
  }
  int status = 1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK(pair.called.peer().send(kWord, bytes("of the parent")));
  CHECK(pair.run([&] { return !pair.caller.frames.empty(); }));
  CHECK_EQ(text(pair.caller.frames[0]), "of the parent");
}

TEST("whatever a network does to the bytes, the received ones are a prefix of the sent ones") {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    std::mt19937_64 draw(seed);
    Raw raw;
    std::vector<std::byte> stream;
    std::vector<size_t> ends;
    for (int n = 0; n < 8; ++n) {
      const auto frame = raw.written(true, kWord, std::string(draw() % kMostWord, 'a'), n);
      // (the frame with number n: the frames before it are written and discarded)
      stream.insert(stream.end(), frame.begin(), frame.end());
      ends.push_back(stream.size());
    }
    size_t n_right = stream.size();  // bytes before the first fault
    const size_t at = draw() % stream.size();
    switch (draw() % 4) {
      case 0:  // dropped
        stream.erase(stream.begin() + static_cast<ptrdiff_t>(at));
        n_right = at;
        break;
      case 1:  // changed
        stream[at] ^= std::byte(1u << draw() % 8);
        n_right = at;
        break;
      case 2: {  // two parts in the wrong order
        const auto middle = stream.begin() + static_cast<ptrdiff_t>(at);
        std::rotate(middle, middle + static_cast<ptrdiff_t>(draw() % (stream.size() - at)),
                    stream.end());
        n_right = at;
        break;
      }
      default:  // cut off
        stream.resize(at);
        n_right = at;
    }
    size_t n_frames = 0;
    for (size_t from = 0; from < stream.size() && !raw.peer->is_lost();) {
      const size_t n = std::min(stream.size() - from, size_t{1 + draw() % 100});
      raw.send(Bytes(stream).subspan(from, n));
      from += n;
      while (raw.step()) ++n_frames;
    }
    shutdown(raw.far, SHUT_WR);
    while (!raw.peer->is_lost() && raw.step()) ++n_frames;
    const auto n_whole = static_cast<size_t>(
        std::ranges::count_if(ends, [&](size_t end) { return end <= n_right; }));
    CHECK(n_frames >= n_whole);
    // A rotation by nothing changes nothing.
    CHECK(n_frames == n_whole || n_frames == ends.size());
  }
}

}  // namespace shoal::test
