// Calls that are cut over several channels: the same bits, the same ends, and no lost wake-up.
#include <linux/filter.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "engine/segments/lanes.h"
#include "test/check.h"
#include "test/cluster.h"

namespace shoal::test {
namespace {

Job large(uint64_t key, Kind kind = Kind::kRingAllReduce, uint64_t n_elems = 60'000) {
  Job job;
  job.kind = kind;
  job.key = key;
  job.n_elems = n_elems;
  job.seed = key;
  job.segment_bytes = 4096;
  return job;
}

bool is_over(const Cluster::Part& part) {
  return eventually([&] { return part.call->is_over(); });
}

TEST("the lanes of a chunk cover each of its segments exactly once") {
  FakeRandom random(5);
  for (int turn = 0; turn < 300; ++turn) {
    const uint64_t n_bytes = 16 * random.below(80);
    const auto n_lanes = static_cast<uint32_t>(1 + random.below(5));
    ProgramBuilder program(2);
    program.send(1, 0);
    Plan plan;
    plan.program = program.done();
    plan.layout[kData] = equal_layout(n_bytes, 1);
    plan.n_lanes = n_lanes;
    const auto sealed = seal(std::move(plan), DType::kFloat32, FoldOp::kSum, 1, 64, "one chunk");
    const Step& step = sealed->program->steps[0];
    Bytes memory(n_bytes);
    for (uint32_t lane = 0; lane < n_lanes; ++lane) {
      Call call;
      call.plan = sealed;
      call.memory[kData] = {memory.data()};
      call.lane.index = lane;
      for (uint32_t at = 0; at < sealed->n_segments(step, lane); ++at) {
        std::byte* segment = call.segment_at(kData, 0, at);
        for (size_t byte = 0; byte < call.segment_bytes(step, at); ++byte)
          segment[byte] = static_cast<std::byte>(static_cast<int>(segment[byte]) + 1);
      }
    }
    CHECK(memory == Bytes(n_bytes, std::byte{1}));
  }
}

TEST("a call that is cut over channels gives the same result as one that is not") {
  for (const int n_channels : {2, 3}) {
    for (const int size : {2, 3, 4}) {
      Cluster cluster(size, 1, 0, 1, 0, n_channels);
      FakeRandom random(static_cast<uint64_t>(10 * n_channels + size));
      for (uint64_t key = 1; key < 40; ++key) cluster.run_all(random_job(random, key, size, 6000));
    }
  }
}

TEST("many threads on each rank finish all their calls, cut or not") {
  for (const int64_t spin_ns : {int64_t{0}, 50 * kSecond / 1'000'000}) {
    Cluster cluster(3, 1, spin_ns, 1, 0, 2);
    constexpr int kThreads = 3;
    in_threads(3 * kThreads, [&](int each) {
      const int rank = each % 3;
      FakeRandom random(static_cast<uint64_t>(each / 3));  // the same for all ranks
      for (uint64_t n = 0; n < 40; ++n) {
        const uint64_t key = kNamed | static_cast<uint64_t>(each / 3) << 32 | n;
        Job job = random_job(random, key, 3, 60'000);
        job.segment_bytes = 4096;
        const bool is_whole = random.chance(0.3);
        const auto part = cluster.post(rank, job, random.chance(0.5), is_whole);
        CHECK(cluster.wait(rank, *part));
        CHECK(Cluster::is_right(*part, rank, 3));
      }
    });
  }
}

TEST("two paths per channel carry calls that are cut, even after one path is lost") {
  Cluster cluster(2, 1, 0, 2, 0, 2);
  cluster.run_all(large(1));
  // Both ends of each; connections that only requested one are closed.
  CHECK(eventually([&] { return cluster.has_all_paths() && connections().size() == 8; }));
  shutdown(connections().back(), SHUT_RDWR);
  for (uint64_t key = 2; key < 10; ++key) cluster.run_all(large(key));
}

TEST("a thread that waits for any call to end is woken by one that is cut, once") {
  Cluster cluster(2, 1, 0, 1, 0, 3);
  for (uint64_t key = 1; key < 30; ++key) {
    const auto part = cluster.post(0, large(key), true);
    std::thread watcher([&] {
      const auto seen = static_cast<int64_t>(key - 1);
      CHECK_EQ(cluster.meshes[0]->wait_finished(seen, kPatience), static_cast<int64_t>(key));
    });
    cluster.run(1, large(key));
    watcher.join();
    CHECK(is_over(*part));
  }
}

// Two ranks with two channels, and their connections.
struct Linked {
  Linked() : cluster(2, 1, 0, 1, 0, 2) {
    in_threads(2, [&](int rank) {
      const auto whole = cluster.post(rank, large(0), false, true);
      CHECK(cluster.wait(rank, *whole));
    });
    CHECK(eventually([] { return connections().size() == 2; }));  // requests are closed
    first = connections();
    cluster.run_all(large(1));
    CHECK(eventually([] { return connections().size() == 4; }));
    for (const int fd : connections())
      if (std::find(first.begin(), first.end(), fd) == first.end()) second.push_back(fd);
    CHECK_EQ(second.size(), 2u);
  }

  Cluster cluster;
  std::vector<int> first, second;  // both ends of each channel's connection, borrowed
};

// Rank 0 is in a call that is cut and in one that is not, and rank 1 in neither.
void check_all_end_alike(Fault fault, const std::function<void(Linked&)>& happens) {
  Linked pair;
  Cluster& cluster = pair.cluster;
  const auto cut = cluster.post(0, large(2), true);
  const auto whole = cluster.post(0, large(3), true, true);
  happens(pair);
  CHECK(is_over(*cut) && is_over(*whole));
  const Error first = cluster.meshes[0]->abort_of(*cluster.groups[0]);
  CHECK(first.fault == fault);
  for (const Cluster::Part* part : {cut.get(), whole.get()}) {
    CHECK_EQ(part->call->outcome().text, first.text);
    CHECK_EQ(part->call->outcome().peer, first.peer);
    CHECK(!part->call->outcome().doing.empty());
  }
  for (const bool is_whole : {false, true}) {  // no later call begins either
    const auto late = cluster.post(0, large(4), true, is_whole);
    CHECK(is_over(*late));
    CHECK(late->call->outcome().fault == fault);
  }
  CHECK(eventually([&] { return bool{cluster.meshes[1]->abort_of(*cluster.groups[1])}; }));
}

TEST("the loss of one channel's connection ends the group in all channels with the same reason") {
  check_all_end_alike(Fault::kPeerLost, [](Linked& pair) { shutdown(pair.second[0], SHUT_RDWR); });
  check_all_end_alike(Fault::kPeerLost, [](Linked& pair) { shutdown(pair.first[0], SHUT_RDWR); });
}

TEST("a local abort and a remote abort end the group in all channels with the same reason") {
  for (const size_t rank : {0u, 1u})
    check_all_end_alike(Fault::kClosed, [&](Linked& pair) {
      pair.cluster.meshes[rank]->abort_group(*pair.cluster.groups[rank], "enough");
    });
}

TEST("a lane's deadline is its call's deadline, and both channels report it") {
  Cluster cluster(2, 1, 0, 1, 0, 2);
  Group& group = *cluster.groups[0];
  const auto plan = cluster.cut(plan_of(large(1), 0, 2));
  Bytes memory = input_of(large(1), 0, 2);
  const auto call = cluster.meshes[0]->post(
      group, Posting{plan, 1, {{memory.data()}}, now_ns() + kMillisecond, true});
  CHECK(eventually([&] { return call->is_over(); }));
  CHECK(call->outcome().fault == Fault::kTimedOut);
  CHECK(call->outcome().text.find("reached the deadline") != std::string::npos);
  CHECK(eventually([&] { return bool{cluster.meshes[1]->abort_of(*cluster.groups[1])}; }));
  CHECK_EQ(cluster.meshes[1]->abort_of(*cluster.groups[1]).text, call->outcome().text);
  const auto state = cluster.meshes[0]->take_state_at_deadline(group);
  CHECK(state != nullptr);
  const auto& [name, more] = std::get<Fields>(state->is).back();
  CHECK_EQ(std::string(name), "more");
  CHECK_EQ(std::get<List>(more.is).size(), 1);
}

// The same with a second channel that accepts bytes and delivers none.
class HalfDead {
 public:
  HalfDead() {
    sock_filter nothing = {BPF_RET | BPF_K, 0, 0, 0};
    const sock_fprog drop_all = {1, &nothing};
    for (const int end : pair_.second)
      CHECK_EQ(setsockopt(end, SOL_SOCKET, SO_ATTACH_FILTER, &drop_all, sizeof(drop_all)), 0);
  }
  // Makes a call that is cut, with one lane that cannot end.
  void post(int64_t timeout_of_0 = kPatience) {
    for (const size_t rank : {0u, 1u}) {
      const int own = static_cast<int>(rank);
      const auto plan = pair_.cluster.cut(plan_of(large(2), own, 2));
      memories_[rank] = input_of(large(2), own, 2);
      calls_.push_back(meshes()[rank]->post(
          *pair_.cluster.groups[rank], Posting{plan,
                                               2,
                                               {{memories_[rank].data()}},
                                               now_ns() + (rank == 0 ? timeout_of_0 : kPatience),
                                               true}));
    }
    for (const auto& call : calls_) CHECK(eventually([&] { return call->finished.load(); }));
  }
  void check_ended(Fault fault) {
    for (const auto& call : calls_) {
      CHECK(eventually([&] { return call->is_over(); }));
      CHECK(call->outcome().fault == fault);
    }
    for (Bytes& memory : memories_) memory = {};  // it belongs to the caller again
    for (size_t rank = 0; rank < 2; ++rank) {
      Bytes memory = input_of(large(3), 0, 2);
      const auto late = meshes()[rank]->post(
          *pair_.cluster.groups[rank],
          Posting{plan_of(large(3), 0, 2), 3, {{memory.data()}}, now_ns() + kPatience, true});
      CHECK(eventually([&] { return late->is_over(); }));  // 1 s at most
      CHECK(late->outcome().fault == fault);
    }
  }
  void cut_second() const { cut(pair_.second); }
  void cut_first() const { cut(pair_.first); }

 private:
  static void cut(const std::vector<int>& ends) {
    for (const int end : ends) shutdown(end, SHUT_RDWR);
  }
  const std::vector<std::shared_ptr<Mesh>>& meshes() const { return pair_.cluster.meshes; }

  Linked pair_;
  std::vector<std::shared_ptr<Call>> calls_;
  std::array<Bytes, 2> memories_;
};

TEST("a deadline on one channel after the other is done ends the call and the group") {
  HalfDead pair;
  pair.post(kSecond);
  pair.check_ended(Fault::kTimedOut);
}

TEST("a peer that dies when only one lane is done ends the call and the group") {
  for (const bool all_at_once : {false, true}) {
    HalfDead pair;
    pair.post();
    if (all_at_once) pair.cut_first();
    pair.cut_second();
    pair.check_ended(Fault::kPeerLost);
  }
}

TEST("where ranks make different calls, one of them cut, both report what both called") {
  Cluster cluster(2, 1, 0, 1, 0, 2);
  const auto cut = cluster.post(0, large(1), true);
  const auto other = cluster.post(1, large(1, Kind::kDirectBroadcast, 40), true, true);
  CHECK(is_over(*cut) && is_over(*other));
  CHECK(cut->call->outcome().fault == Fault::kMismatch);
  CHECK_EQ(cut->call->outcome().text, other->call->outcome().text);
}

TEST("closing a group locally sends nothing on any channel") {
  Cluster cluster(2, 1, 0, 1, 0, 2);
  std::vector<Group*> part;
  for (const auto& mesh : cluster.meshes) part.push_back(&mesh->add_group(8, {0, 1}));
  cluster.meshes[0]->drop_group(*part[0]);
  for (uint64_t key = 1; key < 20; ++key) cluster.run_all(large(key));
  CHECK(!cluster.meshes[1]->abort_of(*part[1]));
}

TEST("a group that ended before it was made here has ended in all channels") {
  Cluster cluster(2, 1, 0, 1, 0, 3);
  Group& there = cluster.meshes[1]->add_group(8, {0, 1});
  cluster.meshes[1]->abort_group(there, "enough");
  for (uint64_t key = 1; key < 5; ++key) cluster.run_all(large(key));  // the reports are here
  Group& here = cluster.meshes[0]->add_group(8, {0, 1});
  const auto plan = cluster.cut(plan_of(large(1), 0, 2));
  Bytes memory = input_of(large(1), 0, 2);
  const auto call = cluster.meshes[0]->post(
      here, Posting{plan, 1, {{memory.data()}}, now_ns() + kPatience, true});
  CHECK(call->is_over());
  CHECK(call->outcome().fault == Fault::kClosed);
}

TEST("closing a mesh ends the waits for calls that are cut") {
  Cluster cluster(2, 1, 0, 1, 0, 3);
  const auto part = cluster.post(0, large(1));
  std::thread waiter([&] { CHECK(!cluster.wait(0, *part)); });
  std::thread watcher([&] { cluster.meshes[0]->wait_finished(0, kPatience); });
  CHECK(eventually([&] { return cluster.is_asleep(0); }));
  cluster.meshes[0]->close();
  waiter.join();
  watcher.join();
  CHECK(part->call->outcome().fault == Fault::kClosed);
}

TEST("a rank that leaves after its last call lets the others finish theirs on every channel") {
  for (int turn = 0; turn < 20; ++turn) {
    Cluster cluster(2, 1, 0, 1, 0, 2);
    const auto part = cluster.post(1, large(1), true);
    cluster.run(0, large(1));
    cluster.meshes[0]->close();
    CHECK(is_over(*part));
    CHECK(!part->call->outcome());
    CHECK(Cluster::is_right(*part, 1, 2));
  }
}

TEST("a forked child cannot use any channel, and the parent's still work") {
  Cluster cluster(2, 1, 0, 1, 0, 2);
  const auto part = cluster.post(0, large(1), true);
  const pid_t child = fork();
  if (child == 0) _exit(cluster.meshes[0]->forsaken() && cluster.meshes[1]->forsaken() ? 0 : 1);
  int status = 0;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
  cluster.run(1, large(1));
  CHECK(is_over(*part));
  CHECK(Cluster::is_right(*part, 0, 2));
}

TEST("lanes share their call's scratch, which counts once toward the ceiling") {
  Lanes lanes(2);
  const auto one = lanes.scratch(1000);
  CHECK(one != nullptr);
  CHECK(one == lanes.scratch(1000));
  Plan plan;
  plan.scratch_bytes = 1001;
  plan.n_lanes = 2;
  Call call;
  call.plan = std::make_shared<const Plan>(plan);
  CHECK_EQ(call.scratch_share(), 501);
}

TEST("channels share the ceiling on staging") {
  Cluster cluster(2, 1, 0, 1, 0, 2);
  const auto state = cluster.meshes[0]->state(kPatience);
  const auto ceiling_of = [](const Value& channel) {
    for (const auto& [name, value] : std::get<Fields>(channel.is))
      if (name == "staging") return std::get<int64_t>(std::get<Fields>(value.is)[0].second.is);
    return int64_t{0};
  };
  const auto& more = std::get<List>(std::get<Fields>(state->is).back().second.is);
  CHECK_EQ(ceiling_of(*state) + ceiling_of(more[0]), Engine::Options{}.staging_bytes);
}

}  // namespace
}  // namespace shoal::test
