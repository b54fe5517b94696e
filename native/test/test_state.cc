// The state that a rank reports while it waits: which peers it waits for, why, since when, and the
// state of its links.
#include <netinet/in.h>
#include <poll.h>
#include <sys/wait.h>

#include <csignal>
#include <optional>

#include "base/locked_within.h"
#include "base/signal_note.h"
#include "engine/shell/state_reader.h"
#include "test/check.h"
#include "test/cluster.h"
#include "test/pool_world.h"
#include "test/values.h"
#include "transport/shm_link.h"
#include "transport/socket_pipe.h"
#include "transport/tcp_link.h"

namespace shoal::test {
namespace {

Value state_of(World& world, int rank) { return StateReader(world.engine(rank), world.now).read(); }
const List& calls_in(const Value& state) { return list(list(state, "groups").at(0), "in_flight"); }

// The first step of a kind with a peer, or null.
const Value* find_step(const Value& call, std::string_view kind, int64_t peer) {
  for (const Value& step : list(call, "steps"))
    if (text(step, "kind") == kind && number(step, "peer") == peer) return &step;
  return nullptr;
}
std::string awaited(const Value& state, std::string_view kind, int64_t peer) {
  const List& calls = calls_in(state);
  const Value* step = calls.empty() ? nullptr : find_step(calls[0], kind, peer);
  return step == nullptr ? "no such step" : text(*step, "awaits");
}
int64_t stalls(const Value& state, size_t peer, std::string_view cause) {
  return number(at(list(state, "peers").at(peer), "stalls"), cause);
}

World::Options calm(bool shares_memory) {
  World::Options options;
  options.net.shares_memory = shares_memory;
  options.shares_buffers = options.idles = 0;
  return options;
}

Job job_of(Kind kind, uint64_t n_elems, uint64_t key = 1) {
  Job job;
  job.kind = kind;
  job.key = key;
  job.n_elems = n_elems;
  job.segment_bytes = 1024;
  return job;
}

TEST("a rank reports which peers its call waits for, why and since when") {
  World world(3, calm(false));
  const Job job = job_of(Kind::kDirectAllReduce, 1024);
  world.post(0, job);
  world.run_steps(200);
  world.post(2, job);
  world.run_steps(1000);

  const Value state = state_of(world, 0);
  CHECK_EQ(calls_in(state).size(), 1);
  const Value& call = calls_in(state)[0];
  CHECK_EQ(text(call, "what"), plan_of(job, 0, 3)->descriptor);
  CHECK_EQ(number(call, "n_bytes"), 4096);
  CHECK_EQ(awaited(state, "send", 1), "grant");
  CHECK_EQ(awaited(state, "recv", 1), "data");
  CHECK(stalls(state, 1, "no_grant") > 0);
  CHECK_EQ(number(*find_step(call, "send", 1), "granted"), 0);
  const double since_s = std::get<double>(at(*find_step(call, "send", 1), "since_s").is);
  CHECK(since_s > 1.0);
  CHECK(since_s <= 1.2);
  std::vector<std::pair<int64_t, bool>> in_call;
  for (const Value& peer : list(call, "peers"))
    in_call.emplace_back(number(peer, "rank"), std::get<bool>(at(peer, "in_call").is));
  std::sort(in_call.begin(), in_call.end());
  CHECK(in_call == (std::vector<std::pair<int64_t, bool>>{{1, false}, {2, true}}));

  // Rank 1 has not made the call, but knows that others have.
  const Value behind = list(state_of(world, 1), "groups").at(0);
  CHECK_EQ(number(behind, "n_calls"), 0);
  CHECK_EQ(list(behind, "made_by_others").size(), 1);
  CHECK_EQ(list(list(behind, "made_by_others")[0], "by").size(), 2);
  CHECK_EQ(text(list(behind, "made_by_others")[0], "agreement"), text(call, "agreement"));

  world.post(1, job);
  CHECK(world.run_all());
  const Value after = state_of(world, 0);
  CHECK(calls_in(after).empty());
  CHECK_EQ(text(list(list(after, "groups")[0], "finished").at(0), "what"), text(call, "what"));
  CHECK_EQ(number(list(after, "groups")[0], "last_number"), 1);
}

TEST("data moved is counted in each direction, whichever way it took") {
  for (const bool shares_memory : {false, true})
    for (const double shares_buffers : {0.0, 1.0})
      for (const uint64_t n_elems : {64, 5000}) {
        World::Options options = calm(shares_memory);
        options.shares_buffers = shares_buffers;
        World world(2, options);
        for (const int rank : {0, 1}) world.post(rank, job_of(Kind::kDirectBroadcast, n_elems));
        CHECK(world.run_all());
        const Value root = list(state_of(world, 0), "peers").at(1);
        const Value other = list(state_of(world, 1), "peers").at(0);
        CHECK_EQ(number(root, "n_bytes_out"), 4 * n_elems);
        CHECK_EQ(number(root, "n_bytes_in"), 0);
        CHECK_EQ(number(other, "n_bytes_in"), 4 * n_elems);
        CHECK(number(root, "n_frames_out") > 0);
        CHECK(number(other, "n_frames_in") > 0);
      }
}

TEST("data moved in a narrow format is counted in wire bytes") {
  World world(2, calm(false));
  Job job = job_of(Kind::kShardedAllReduce, 6400);
  job.codec = Codec::kMxFp8;
  for (const int rank : {0, 1}) world.post(rank, job);
  CHECK(world.run_all());
  const Value peer = list(state_of(world, 0), "peers").at(1);
  // Half of the elements to the other reducer, half as the result; 33 bytes for each 32 elements.
  CHECK_EQ(number(peer, "n_bytes_out"), 6400 / 32 * 33);
  CHECK_EQ(number(peer, "n_bytes_in"), 6400 / 32 * 33);
}

TEST("rates cover the last seconds") {
  Traffic traffic(2);
  traffic.sample(10 * kSecond);
  traffic[1].n_bytes_out = 1000;
  traffic.sample(11 * kSecond);
  traffic[1].n_bytes_out = 4000;
  traffic[1].n_bytes_in = 500;
  CHECK_EQ(traffic.rates(1, 11 * kSecond + kSecond / 2).out, 4000 / 1.5);
  traffic.sample(12 * kSecond);
  traffic.sample(12 * kSecond + kMillisecond);  // too soon to count
  CHECK_EQ(traffic.rates(1, 13 * kSecond).out, 3000 / 2.0);
  CHECK_EQ(traffic.rates(1, 13 * kSecond).in, 500 / 2.0);
  traffic.sample(13 * kSecond);
  traffic.sample(14 * kSecond);
  CHECK_EQ(traffic.rates(1, 14 * kSecond + kSecond / 2).out, 0.0);
}

TEST("a sender whose slots are all held reports it") {
  World world(2, calm(true));
  const Job job = job_of(Kind::kDirectBroadcast, 16 * 256);
  world.post(0, job);
  world.stop(1);
  world.run_steps(50);
  // Until the peer has made the call too, nothing goes into slots.
  CHECK_EQ(awaited(state_of(world, 0), "send", 1), "grant");
  world.go_on(1);
  // It takes part, and then reads nothing more while it holds all slots but the last.
  world.post(1, job);
  CHECK(world.run([&] {
    const Value state = state_of(world, 0);
    return calls_in(state).empty() || awaited(state, "send", 1) == "slot";
  }));
  CHECK(stalls(state_of(world, 0), 1, "no_slot") > 0);
}

TEST("a call reports that it waits for scratch or for its turn") {
  World::Options options = calm(false);
  options.engine.staging_bytes = 1u << 20;
  World world(2, options);
  for (uint64_t key = 0; key < 8; ++key)
    world.post(0, job_of(Kind::kDirectAllReduce, 100u << 10, key));
  world.run_steps(1000);
  const Value state = state_of(world, 0);
  CHECK_EQ(calls_in(state).size(), 8);
  CHECK_EQ(text(calls_in(state)[0], "scratch"), "held");
  CHECK_EQ(text(calls_in(state)[7], "scratch"), "awaited");
  const auto has = [&](size_t call, std::string_view word) {
    const List& steps = list(calls_in(state)[call], "steps");
    return std::any_of(steps.begin(), steps.end(),
                       [&](const Value& step) { return text(step, "awaits") == word; });
  };
  CHECK(has(0, "turn"));
  CHECK(!has(0, "scratch"));
  CHECK(has(7, "scratch"));
}

TEST("small messages beyond the allowance wait for credit") {
  World::Options options = calm(false);
  options.engine.staging_bytes = 64u << 10;  // a quarter of it for early messages
  World world(2, options);
  for (uint64_t key = 0; key < 60; ++key) world.post(0, job_of(Kind::kDirectBroadcast, 200, key));
  world.run_steps(100);
  const Value state = state_of(world, 0);
  CHECK(stalls(state, 1, "no_credit") > 0);
  CHECK_EQ(awaited(state, "send", 1), "credit");
  CHECK(number(list(state, "peers")[1], "eager_out_bytes") > 10'000);
}

TEST("staging that cannot be granted is counted") {
  World::Options options = calm(false);
  options.engine.staging_bytes = 1u << 20;
  World world(3, options);
  for (uint64_t key = 0; key < 6; ++key)
    for (int rank = 0; rank < 3; ++rank) {
      Job job = job_of(Kind::kRingAllReduce, 200'000, key);
      job.segment_bytes = 64u << 10;
      world.post(rank, job);
    }
  CHECK(world.run_all());
  int64_t n = 0;
  for (int rank = 0; rank < 3; ++rank)
    for (size_t peer = 0; peer < 3; ++peer) n += stalls(state_of(world, rank), peer, "no_staging");
  CHECK(n > 0);
}

TEST("bytes unread by the peer and bytes unsent by the link are reported as waits") {
  for (const bool shares_memory : {true, false}) {
    World::Options options = calm(shares_memory);
    options.shares_buffers = 1;
    options.net.room = 1;
    options.net.copied = 0;
    World world(2, options);
    for (const int rank : {0, 1}) world.post(rank, job_of(Kind::kDirectBroadcast, 16 * 256));
    // Private memory of the receiver: peers do not write it, but the receiver reads slots.
    CHECK(world.run([&] {
      const Value state = state_of(world, 0);
      return calls_in(state).empty() ||
             awaited(state, "send", 1) == (shares_memory ? "consumed" : "link");
    }));
    CHECK(!calls_in(state_of(world, 0)).empty());
    CHECK(world.run_all());
  }
}

TEST("a report too long to send is cut, and states how much is missing") {
  World world(2, calm(false));
  for (uint64_t key = 0; key < 2000; ++key)
    world.post(0, job_of(Kind::kDirectAllReduce, 1024, key));
  world.run_steps(10);
  const Value state = state_of(world, 0);
  const Value& group = list(state, "groups")[0];
  CHECK_EQ(number(state, "n_in_flight"), 2000);
  CHECK_EQ(calls_in(state).size(), 1024);
  CHECK_EQ(number(group, "n_in_flight_left_out"), 2000 - 1024);
  int64_t n_steps = 0;
  for (const Value& call : calls_in(state)) {
    n_steps += static_cast<int64_t>(list(call, "steps").size());
    CHECK_EQ(number(call, "n_steps_left"),
             number(call, "n_steps_left_out") + static_cast<int64_t>(list(call, "steps").size()));
  }
  CHECK(n_steps <= 4096);
}

TEST("a receive from any rank is reported as a wait for a message") {
  World world(2, calm(false));
  std::array<float, 4> data{};
  const auto plan = plan_of(job_of(Kind::kDirectBroadcast, 4), 1, 2);
  const auto call = world.engine(0).post(
      *world.groups[0],
      Message{plan, false, -1, 5, reinterpret_cast<std::byte*>(data.data()), World::kNever});
  world.run_steps(100);
  CHECK(std::get<bool>(at(calls_in(state_of(world, 0)).at(0), "awaits_message").is));
  CHECK(!call->finished);
}

TEST("before a deadline ends a group, every rank of it can report what it waited for") {
  World world(3, calm(false));
  std::vector<std::optional<Value>> states(3);
  for (int rank = 0; rank < 3; ++rank)
    world.engine(rank).hooks.on_deadline = [&, rank](Group& group) {
      CHECK_EQ(group.id, World::kGroup);
      CHECK(!states[static_cast<size_t>(rank)].has_value());
      states[static_cast<size_t>(rank)] = state_of(world, rank);
    };
  const Job job = job_of(Kind::kDirectAllReduce, 1024);
  const int64_t deadline = world.now + kSecond;
  world.post(0, job, deadline);
  world.post(2, job);
  CHECK(world.run_all());
  CHECK(world.run([&] { return states[1].has_value(); }));
  for (const int rank : {0, 2}) {
    CHECK_EQ(calls_in(*states[static_cast<size_t>(rank)]).size(), 1);
    CHECK_EQ(awaited(*states[static_cast<size_t>(rank)], "recv", 1), "data");
  }
  CHECK(calls_in(*states[1]).empty());
  CHECK(calls_in(state_of(world, 0)).empty());
}

TEST("a group that ends for another reason reports no waits") {
  World world(2, calm(false));
  world.engine(0).hooks.on_deadline = [](Group&) {
    fail(__FILE__, __LINE__, "no deadline passed");
  };
  world.post(0, job_of(Kind::kDirectAllReduce, 1024));
  world.engine(0).abort_group(*world.groups[0], {Fault::kClosed, 0, "enough"}, true);
  world.run_steps(10);
}

// ---- meshes

TEST("any thread may read the state of ranks at work, at any time") {
  for (const int per_host : {3, 1}) {
    Cluster cluster(3, per_host);
    std::atomic<bool> is_over{false};
    std::thread reader([&] {
      while (!is_over)
        for (const auto& mesh : cluster.meshes) CHECK(mesh->state(kPatience) != nullptr);
    });
    for (uint64_t key = 0; key < 40; ++key) {
      Job job = job_of(Kind::kRingAllReduce, 50'000, key);
      job.segment_bytes = 4096;
      cluster.run_all(job);
    }
    is_over = true;
    reader.join();
  }
}

TEST("the state can be read while all threads of a rank wait") {
  Cluster cluster(2, 2);
  const Job job = job_of(Kind::kDirectAllReduce, 4);
  std::thread waiter([&] { cluster.run(0, job); });
  CHECK(eventually([&] { return cluster.is_asleep(0); }));
  const auto state = cluster.meshes[0]->state(kPatience);
  CHECK_EQ(number(*state, "n_threads_waiting"), 1);
  CHECK_EQ(awaited(*state, "recv", 1), "data");
  cluster.run(1, job);
  waiter.join();
}

TEST("a closed or forked mesh reports nothing in flight") {
  Cluster cluster(2, 1);
  cluster.meshes[0]->close();
  CHECK(std::get<bool>(at(*cluster.meshes[0]->state(kPatience), "is_closed").is));
}

TEST("a lock that another thread holds is waited for within a limit") {
  std::mutex mutex;
  {
    std::lock_guard held(mutex);
    std::thread other([&] { CHECK(!locked_within(mutex, kMillisecond)); });
    other.join();
  }
  CHECK(locked_within(mutex, 0));
}

// ---- links

// Accepts nothing.
class Nobody final : public FrameSink {
 public:
  std::span<std::byte> receive_buffer(int, const Header&) override { return {}; }
  void arrived(int, const Header&, std::span<std::byte>) override {}
  void sent(int, uint64_t) override {}
  void spoiled(int, uint64_t) override {}
  void moved(int, uint64_t, Moved) override {}
  void released(int, uint64_t) override {}
  void broken(int, const Error&) override {}
};

TEST("a ring whose peer does not read fills up and reports it") {
  Arena own, theirs;
  CHECK(!Arena::create(2, own));
  CHECK(!Arena::enter(dup(own.memory_fd()), 2, 1, theirs));
  ShmLink link(1, own, 1);
  CHECK(!link.open());
  Nobody sink;
  const Bytes payload(link.max_inline());
  Frame frame;
  frame.header.type = FrameType::kData;
  frame.header.length = static_cast<uint32_t>(payload.size());
  frame.payload = payload.data();
  while (link.send(frame)) CHECK_EQ(link.state().n_full, 0);
  CHECK_EQ(link.state().n_full, 1);
  CHECK_EQ(link.state().n_queued, 1);
  link.close();
}

TEST("a socket whose peer does not read fills up and reports it") {
  std::array<int, 2> fds{};
  CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()), 0);
  TcpLink link(1, 1, FrameKeys({}, 77, 0, 1));
  CHECK(link.add_path(0, std::make_unique<SocketPipe>(fds[0]), {}));
  Nobody sink;
  const Bytes payload(4u << 20);
  Frame frame;
  frame.header.type = FrameType::kData;
  frame.header.length = static_cast<uint32_t>(payload.size());
  frame.payload = payload.data();
  frame.token = 1;
  link.send(frame);
  CHECK_EQ(link.state().n_full, 0);
  link.flush(sink);
  CHECK_EQ(link.state().n_queued, 1);
  CHECK(link.state().n_full > 0);
  CHECK(link.state().queued_bytes > 0);
  CHECK(link.state().queued_bytes <
        sizeof(Header) + payload.size());  // some of it is in the kernel
  link.close();
  ::close(fds[1]);
}

TEST("the kernel reports on a TCP connection, and on no other socket") {
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  CHECK_EQ(bind(listener, generic, length), 0);
  CHECK_EQ(listen(listener, 1), 0);
  CHECK_EQ(getsockname(listener, generic, &length), 0);
  const int end = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK_EQ(connect(end, generic, length), 0);
  CHECK(state_of_socket(end).is_tcp);
  CHECK(state_of_socket(end).congestion_window > 0);
  CHECK(!state_of_socket(-1).is_tcp);
  CHECK(!state_of_socket(STDIN_FILENO).is_tcp);
  ::close(end);
  ::close(listener);
}

// ---- the signal

std::atomic<int> n_handled_before{0};

// The notes left since the last time; 0 if none.
uint64_t notes_in(int fd) {
  pollfd ready{fd, POLLIN, 0};
  uint64_t n = 0;
  if (poll(&ready, 1, 0) == 1) CHECK_EQ(read(fd, &n, sizeof(n)), ssize_t{sizeof(n)});
  return n;
}

TEST("a signal leaves a note, and the previous handler still runs") {
  struct sigaction before{};
  before.sa_handler = [](int) { n_handled_before++; };
  CHECK_EQ(sigaction(SIGUSR2, &before, nullptr), 0);
  Error error;
  const int fd = note_signal(SIGUSR2, error);
  CHECK(fd >= 0);
  raise(SIGUSR2);
  CHECK_EQ(notes_in(fd), 1);
  CHECK_EQ(n_handled_before.load(), 1);
  CHECK_EQ(note_signal(SIGUSR2, error), fd);
  CHECK(!error);
  CHECK_EQ(note_signal(SIGUSR1, error), -1);
  CHECK(bool{error});
}

TEST("in a forked child the signal leaves no note for the parent, and can be requested again") {
  Error error;
  const int fd = note_signal(SIGUSR2, error);
  const pid_t child = fork();
  if (child == 0) {
    raise(SIGUSR2);
    Error refused;
    const int own = note_signal(SIGUSR2, refused);
    raise(SIGUSR2);
    _exit(own >= 0 && notes_in(own) == 1 ? 0 : 1);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  CHECK_EQ(notes_in(fd), 0);
}

TEST("a server reports the calls that it serves and the ranks that they wait for") {
  Pool pool(2, 1, calm(false));
  PoolJob job{2, 1};
  job.n_elems = 5000;
  pool.serve(job);
  pool.post(0, job);
  pool.world.run_steps(50);
  const Value state = state_of(pool.world, 2);
  CHECK_EQ(number(list(state, "groups").at(0), "n_plans_served"), 1);
  CHECK_EQ(number(list(state, "groups").at(0), "n_waiting_for_room"), 0);
  CHECK_EQ(calls_in(state).size(), 1u);
  CHECK(std::get<bool>(at(calls_in(state)[0], "is_served").is));
  CHECK_EQ(list(calls_in(state)[0], "uncommitted").size(), 2u);
  CHECK_EQ(text(calls_in(state)[0], "scratch"), "held");
  CHECK_EQ(awaited(state, "recv", 1), "data");
  CHECK(number(state, "scratch_bytes") > 0);
}

}  // namespace
}  // namespace shoal::test
