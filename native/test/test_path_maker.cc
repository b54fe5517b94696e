// Real meshes, sockets and progress threads whose connections are cut and made again; and strangers
// that connect.
#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "test/cluster.h"
#include "test/ends.h"
#include "transport/path_maker.h"
#include "transport/socket_pipe.h"
#include "transport/tcp_link.h"

namespace shoal::test {
namespace {

constexpr int64_t kResumeNs = End::kResumeNs;

Job job_of(uint64_t key, uint64_t n_elems = 300'000) {
  Job job;
  job.kind = Kind::kDirectAllReduce;
  job.key = key;
  job.n_elems = n_elems;
  job.segment_bytes = 128u << 10;
  return job;
}

// ---- lost and new paths

TEST("calls succeed while connections are cut in the middle of them, again and again") {
  for (const auto& [n_paths, n_channels] : {std::pair{1, 1}, {2, 1}, {3, 1}, {1, 3}, {2, 2}}) {
    Cluster cluster(2, 1, 0, n_paths, kResumeNs, n_channels);
    constexpr uint64_t kCalls = 8;
    std::atomic<uint64_t> n_begun{0}, n_cut{0};  // one cut for each call
    in_threads(3, [&](int rank) {
      if (rank < 2) {
        for (uint64_t key = 1; key <= kCalls; ++key) {
          while (rank == 0 && n_cut + 1 < key) std::this_thread::yield();
          if (rank == 0) n_begun = key;
          cluster.run(rank, job_of(key));
        }
        return;
      }
      for (; n_cut < kCalls; n_cut++) {
        while (n_begun <= n_cut) std::this_thread::yield();
        poll(nullptr, 0, static_cast<int>(n_cut % 3));
        // NOT held: if another thread closes it meanwhile and opens another, this cuts the new one.
        const std::vector<int> all = connections();
        if (!all.empty()) shutdown(all[n_cut % all.size()], SHUT_RDWR);
      }
    });
  }
}

TEST("all connections cut while idle are made again for the next call") {
  for (const int n_channels : {1, 2}) {
    Cluster cluster(3, 1, 0, 2, kResumeNs, n_channels);
    cluster.run_all(job_of(1));
    for (uint64_t round = 0; round < 5; ++round) {
      for (const int fd : connections()) shutdown(fd, SHUT_RDWR);
      cluster.run_all(job_of(2 + round));
    }
  }
}

TEST("a rank whose process ends is lost to its dialler and to the rank that it dials") {
  Cluster cluster(2, 1, 0, 1, kHour);
  cluster.run_all(job_of(1));
  const auto one = cluster.post(0, job_of(2), true);
  const auto other = cluster.post(1, job_of(3), true);
  // What kernels do for a dead process: everything is closed, without a goodbye.
  for (const int fd : cluster.listeners) shutdown(fd, SHUT_RDWR);
  for (const int fd : connections()) shutdown(fd, SHUT_RDWR);
  for (const auto& part : {&one, &other}) {
    CHECK(eventually([&] { return (*part)->call->finished.load(); }));
    CHECK((*part)->call->error.fault == Fault::kPeerLost);
    CHECK((*part)->call->error.text.find("no process listens at 127.0.0.1:") != std::string::npos ||
          (*part)->call->error.text.find("gave this rank up") != std::string::npos);
  }
}

TEST("a rank lost on all its channels ends each cut call once, and groups made later") {
  Cluster cluster(2, 1, 0, 2, kHour, 2);
  cluster.run_all(job_of(1));
  const auto one = cluster.post(0, job_of(2), true);
  const auto other = cluster.post(1, job_of(3), true);
  for (const int fd : cluster.listeners) shutdown(fd, SHUT_RDWR);
  for (const int fd : connections()) shutdown(fd, SHUT_RDWR);
  for (const auto& part : {&one, &other}) {
    CHECK(eventually([&] { return (*part)->call->is_over(); }));
    CHECK((*part)->call->outcome().fault == Fault::kPeerLost);
  }
  for (const auto& mesh : cluster.meshes)
    CHECK(mesh->abort_of(mesh->add_group(8, {0, 1})).fault == Fault::kPeerLost);
}

TEST("a path whose local address is gone from this host is dialled from another") {
  const int listener = listen_on_loopback(), epoll = epoll_create1(EPOLL_CLOEXEC);
  Connector connector(epoll, 0, [](const Connector::Wish&) { return Secret(); }, {}, {});
  Connector::Wish wish;
  wish.to = address_of(listener);
  wish.from = Address::of("192.0.2.1", 0);  // of no host: RFC 5737
  connector.want(wish, 0);
  int64_t now = 0;
  for (int n = 0; n < 2; ++n) now = connector.step(now);
  pollfd caller{listener, POLLIN, 0};
  CHECK_EQ(poll(&caller, 1, 5000), 1);
  connector.close();
  for (const int fd : {listener, epoll}) close(fd);
}

void check_children_have_none(int n_channels) {
  Cluster cluster(2, 1, 0, 1, kHour, n_channels);
  std::atomic<bool> is_over{false};
  std::thread cutter([&] {
    while (!is_over) {
      for (const int fd : connections()) shutdown(fd, SHUT_RDWR);
      poll(nullptr, 0, 1);
    }
  });
  for (int n = 0; n < 50; ++n) {
    const pid_t child = fork();
    if (child == 0) _exit(connections().empty() ? 0 : 1);
    int status = -1;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
  }
  is_over = true;
  cutter.join();
  cluster.run_all(job_of(1));
}

TEST("a child forked while connections are lost and made again has none of them") {
  for (const int n_channels : {1, 3}) check_children_have_none(n_channels);
}

// A connection that a thread is about to close has no owner, and is still open.
TEST("a child has none of the parent's sockets, whichever component holds them") {
  ProgressThread::of(0);  // from now on forks are noticed
  const auto fds = tcp_sockets();
  const SocketPipe near(fds[0]), far(fds[1]);
  const pid_t child = fork();
  if (child == 0) _exit(connections().empty() ? 0 : 1);
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK_EQ(connections().size(), 2u);
}

// The identity of a descriptor, whose number may soon be reused; empty: closed. NOT fstat(2):
// ThreadSanitizer reports a race with the thread that closes the descriptor.
std::string target_of(int fd) {
  std::array<char, 64> name{};
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  const ssize_t n = readlink(link.c_str(), name.data(), name.size());
  return {name.data(), static_cast<size_t>(std::max<ssize_t>(n, 0))};
}

// Holds every descriptor of the process.
class NoDescriptors {
 public:
  NoDescriptors() {
    CHECK_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit few = {64, before_.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &few), 0);
    take();
  }
  ~NoDescriptors() {
    for (const int fd : taken_) close(fd);
    CHECK_EQ(setrlimit(RLIMIT_NOFILE, &before_), 0);
  }
  void take() {  // descriptors freed since
    for (int fd = dup(0); fd >= 0; fd = dup(0)) taken_.push_back(fd);
  }

 private:
  rlimit before_{};
  std::vector<int> taken_;
};

TEST("without descriptors connections are made again later, and nothing fails") {
  Cluster cluster(2, 1, 0, 1, kHour);
  cluster.run_all(job_of(1));
  std::optional<NoDescriptors> none(std::in_place);
  const std::vector<int> all = connections();
  std::set<std::string> cut;
  for (const int fd : all) cut.insert(target_of(fd));
  const auto one = cluster.post(0, job_of(2), true), other = cluster.post(1, job_of(2), true);
  for (const int fd : all) shutdown(fd, SHUT_RDWR);
  // Closing them frees two, of the four that two dials with both their ends need.
  CHECK(eventually([&] {
    const std::vector<int> now = connections();
    return std::none_of(now.begin(), now.end(),
                        [&](int fd) { return cut.contains(target_of(fd)); });
  }));
  none->take();
  poll(nullptr, 0, 100);
  none.reset();
  for (const auto& part : {&one, &other}) {
    CHECK(eventually([&] { return (*part)->call->finished.load(); }));
    CHECK_EQ((*part)->call->error.text, "");
  }
}

// ---- two makers without meshes, in one thread

// Otherwise the rank that is asked takes them for lost a second later, and makes them once more.
TEST("the accepting rank requests no path that it already has") {
  const std::array<int, 2> listeners = {listen_on_loopback(), listen_on_loopback()};
  End low(0, listeners[0], address_of(listeners[1])),
      high(1, listeners[1], address_of(listeners[0]));
  high.link->dial();
  CHECK(eventually([&] {
    high.maker->step();
    low.maker->step();
    high.notify();
    return high.link->fds().size() == 2;
  }));
  for (int n = 0; n < 100; ++n) low.maker->step();
  low.notify();
  CHECK_EQ(low.link->fds().size(), 2u);
  // Well beyond the time after which it asks.
  for (const int64_t until = now_ns() + 200 * kMillisecond; now_ns() < until;) {
    low.maker->step();
    high.maker->step();
  }
  CHECK(!high.maker->calls(0));
}

TEST("a rank without descriptors reports how many callers it refused, and its peer what it met") {
  const std::array<int, 2> listeners = {listen_on_loopback(), listen_on_loopback()};
  End low(0, listeners[0], address_of(listeners[1])),
      high(1, listeners[1], address_of(listeners[0]));
  CHECK_EQ(high.maker->source(0).last_failure(0), "");
  high.link->dial();
  {
    const NoDescriptors none;
    high.maker->step();
    CHECK_EQ(high.maker->source(0).last_failure(0),
             "Too many open files: rank 1 has no file descriptor left (ulimit -n)");
  }
  const int caller = socket(AF_INET, SOCK_STREAM, 0);
  {
    const NoDescriptors none;
    const Address door = address_of(listeners[0]);
    CHECK_EQ(connect(caller, reinterpret_cast<const sockaddr*>(&door.at), door.length), 0);
    low.maker->step();
    char byte;
    CHECK(recv(caller, &byte, 1, 0) <= 0);
    CHECK_EQ(low.maker->source(0).last_failure(1),
             "rank 0 refused 1 connections for want of a file descriptor (ulimit -n)");
  }
  close(caller);
}

// ---- strangers

TEST("strangers' connections are bounded, cost the job nothing and keep no peer out") {
  Cluster cluster(2, 1, 0, 1, kHour);
  cluster.run_all(job_of(1));
  const Address door = address_of(cluster.listeners[0]);
  const std::vector<int> before = connections();
  std::vector<int> held;
  for (int n = 0; n < 200; ++n) {
    held.push_back(connect_to(door));
    if (n % 2 == 0) send(held.back(), "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL);
  }
  for (const int fd : before) shutdown(fd, SHUT_RDWR);
  cluster.run_all(job_of(2));
  // Callers that sent garbage were closed, and of the silent ones only as many as fit remain.
  int n_closed = 0;
  for (const int fd : held) {
    char byte;
    n_closed += recv(fd, &byte, 1, MSG_DONTWAIT) >= 0 || errno != EAGAIN;
    close(fd);
  }
  CHECK(n_closed >= 100);
}

// ---- the listener by itself

// A client's side of the proof, over a blocking socket. Returns its outcome.
Progress knock(const Address& door, const Hello& hello, const std::vector<std::byte>& key) {
  const int fd = connect_to(door);
  ClientHandshake client(hello, pair_key(key, hello.epoch, hello.rank, hello.to_rank, "path"));
  CHECK(send(fd, client.hello().data(), client.hello().size(), 0) > 0);
  std::array<std::byte, 128> room{};
  while (client.wants() > 0) {
    const ssize_t n = recv(fd, room.data(), client.wants(), 0);
    if (n <= 0) break;
    std::vector<std::byte> reply;
    client.feed({room.data(), static_cast<size_t>(n)}, reply);
    if (!reply.empty()) CHECK(send(fd, reply.data(), reply.size(), MSG_NOSIGNAL) > 0);
  }
  close(fd);
  return client.progress();
}

TEST("only a key holder with a place here gets in, and a rank that was given up learns so") {
  Cluster cluster(3, 1, 0, 2, kHour);
  const Address door = address_of(cluster.listeners[1]);
  const auto& key = Cluster::key();
  const std::vector<std::byte> other_key(32, std::byte{8});
  const uint64_t epoch = Cluster::kEpoch;
  const uint32_t asks = PathMaker::kMostConnections;
  CHECK(knock(door, {epoch, 2, 1, 0}, other_key) == Progress::kKeyDiffers);
  CHECK(knock(door, {epoch + 1, 2, 1, 0}, key) == Progress::kStale);
  for (const Hello& stranger : {Hello{epoch, 3, 1, 0},
                                {epoch, 2, 0, 0},
                                {epoch, 1, 1, 0},
                                {epoch, 2, 1, 2},
                                {epoch, 2, 1, asks},
                                {epoch, 0, 1, 0},
                                {epoch, 0, 1, asks + 2},
                                {epoch, 0, 1, 2 * asks},
                                {epoch, ~0u, 1, 0},
                                {epoch, 2, 1, ~0u}})
    CHECK(knock(door, stranger, key) == Progress::kWaiting);
  CHECK(knock(door, {epoch, 0, 1, asks}, key) == Progress::kDone);
  cluster.meshes[0]->close();
  CHECK(eventually([&] { return knock(door, {epoch, 0, 1, asks}, key) == Progress::kStale; }));
}

// Sends HELLO over a new connection, and nothing else.
int greet(const Address& door, const Hello& hello, const std::vector<std::byte>& key) {
  const int fd = connect_to(door);
  const ClientHandshake client(hello,
                               pair_key(key, hello.epoch, hello.rank, hello.to_rank, "path"));
  CHECK(send(fd, client.hello().data(), client.hello().size(), 0) > 0);
  return fd;
}

TEST("a HELLO with the right epoch and the wrong key is refused and closed at once") {
  Cluster cluster(2, 1, 0, 1, kHour);
  const Hello hello{Cluster::kEpoch, 0, 1, PathMaker::kMostConnections};
  const int fd =
      greet(address_of(cluster.listeners[1]), hello, std::vector<std::byte>(32, std::byte{8}));
  std::array<std::byte, 128> room{};
  while (const ssize_t n = recv(fd, room.data(), room.size(), 0)) CHECK(n > 0);
  close(fd);
}

TEST("replayed HELLOs in every place keep no holder of the key out") {
  Cluster cluster(2, 1, 0, 1, kHour);
  const Address door = address_of(cluster.listeners[1]);
  const Hello hello{Cluster::kEpoch, 0, 1, PathMaker::kMostConnections};
  std::vector<int> held;
  for (size_t n = 0; n < Acceptor::kMostPending; ++n) {
    held.push_back(greet(door, hello, Cluster::key()));
    std::array<std::byte, 128> room{};
    CHECK(recv(held.back(), room.data(), room.size(), 0) > 0);  // it has its place
  }
  CHECK(knock(door, hello, Cluster::key()) == Progress::kDone);
  for (const int fd : held) close(fd);
}

}  // namespace
}  // namespace shoal::test
