// Threads, doorbells and the progress thread: a thread that brings work wakes the sleepers, and no
// timer hides a forgotten wake-up (cluster.h).
#include <poll.h>
#include <sys/eventfd.h>

#include <array>
#include <atomic>

#include "test/check.h"
#include "test/cluster.h"

namespace shoal::test {
namespace {

Job small(uint64_t key, Kind kind = Kind::kDirectAllReduce, uint64_t n_elems = 4) {
  Job job;
  job.kind = kind;
  job.key = key;
  job.n_elems = n_elems;
  job.seed = key;
  job.segment_bytes = 128u << 10;
  return job;
}

Job from_rank_0(uint64_t key, uint64_t n_bytes) {
  return small(key, Kind::kDirectBroadcast, n_bytes / sizeof(float));
}

// Of 16 KiB each, through a ring of 128: more than fit, but too few to return a credit.
constexpr uint64_t kMessages = 20;

TEST("a sender blocked by a full ring continues when the receiver reads") {
  Cluster cluster(2, 2);
  for (uint64_t round = 0; round < 50; ++round) {
    std::atomic<uint64_t> n_posted{0};
    in_threads(2, [&](int rank) {
      if (rank == 1) CHECK(eventually([&] { return n_posted > 6; }));
      for (uint64_t n = 0; n < kMessages; ++n) {
        const auto part = cluster.post(rank, from_rank_0(round << 8 | n, 16u << 10));
        if (rank == 0) n_posted++;
        CHECK(cluster.wait(rank, *part));
        CHECK(Cluster::is_right(*part, rank, 2));
      }
    });
  }
}

TEST("a sender of asynchronous messages blocked by a full ring continues without a caller") {
  Cluster cluster(2, 2);
  for (uint64_t round = 0; round < 50; ++round) {
    std::vector<std::unique_ptr<Cluster::Part>> parts;
    for (uint64_t n = 0; n < kMessages; ++n)
      parts.push_back(cluster.post(0, from_rank_0(round << 8 | n, 16u << 10), true));
    for (uint64_t n = 0; n < kMessages; ++n) cluster.run(1, from_rank_0(round << 8 | n, 16u << 10));
    for (const auto& part : parts) CHECK(eventually([&] { return part->call->finished.load(); }));
  }
}

using Words = std::vector<uint32_t>;

size_t at(int rank) { return static_cast<size_t>(rank); }

// True if the eventfd was rung; clears it.
bool is_rung(int fd) {
  pollfd watched{fd, POLLIN, 0};
  uint64_t n = 0;
  return poll(&watched, 1, static_cast<int>(kPatience / kMillisecond)) == 1 &&
         read(fd, &n, sizeof(n)) == sizeof(n) && n > 0;
}

TEST("a mesh that is to be closed after a time sends its goodbye then, and is closed once") {
  Cluster cluster(2, 1);
  cluster.run_all(small(1));
  for (int n = 0; n < 2; ++n) cluster.meshes[0]->close_after(0);
  const auto part = cluster.post(1, small(2), true);
  CHECK(eventually([&] { return part->call->finished.load(); }));
  CHECK(part->call->error.fault == Fault::kPeerLost);
  CHECK(part->call->error.text.starts_with("left the group"));
  CHECK(
      eventually([&] { return cluster.meshes[0].use_count() == 1; }));  // both threads are through
}

TEST("an eventfd is rung for a message without a receive and for the end of its group") {
  Cluster cluster(2, 1);
  const int bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  CHECK(cluster.meshes[1]->notify(*cluster.groups[1], bell));
  CHECK(is_rung(bell));  // for earlier messages
  std::array<Words, 2> words = {Words{1, 2}, Words{0, 0}};
  const auto post = [&](int rank) {
    Plan plan;
    plan.program = point_to_point(rank, 2, 0, 1);
    plan.layout[kData] = equal_layout(sizeof(uint32_t) * 2, 1);
    return cluster.meshes[at(rank)]->post(
        *cluster.groups[at(rank)],
        Message{seal(std::move(plan), DType::kUint32, FoldOp::kSum, 1, 256, "message"), rank == 0,
                1 - rank, 5, reinterpret_cast<std::byte*>(words[at(rank)].data()),
                now_ns() + kPatience, true});
  };
  const auto sent = post(0);
  CHECK(is_rung(bell));
  CHECK(cluster.meshes[1]->has_message(*cluster.groups[1], 0, 5));
  const auto received = post(1);
  CHECK(eventually([&] { return received->is_over() && sent->is_over(); }));
  CHECK(words[1] == words[0]);
  cluster.meshes[0]->abort_group(*cluster.groups[0], "it is over");
  CHECK(is_rung(bell));
  CHECK(eventually(
      [&] { return static_cast<bool>(cluster.meshes[1]->abort_of(*cluster.groups[1])); }));
  cluster.meshes[0]->close();
  CHECK(cluster.meshes[1]->notify(*cluster.groups[1], bell));  // one registration is enough
  CHECK(!cluster.meshes[0]->notify(*cluster.groups[0], -1));
  close(bell);
}

TEST("a thread that waits for several ranks' messages wakes when the last has arrived") {
  // Frames are counted, however many leave at once.
  for (const Kind kind : {Kind::kDirectAllReduce, Kind::kDirectAllGather, Kind::kRingAllGather}) {
    Cluster cluster(8, 8);
    for (uint64_t key = 0; key < 20; ++key) {
      const int late = static_cast<int>(key % 8);
      in_threads(8, [&](int rank) {
        const auto others_sleep = [&] {
          for (int other = 0; other < 8; ++other)
            if (other != late && !cluster.is_asleep(other)) return false;
          return true;
        };
        if (rank == late) CHECK(eventually(others_sleep));
        cluster.run(rank, small(key, kind));
      });
    }
  }
}

TEST("several messages that leave together wake every thread that waits for all of them") {
  Cluster cluster(2, 2);
  constexpr uint32_t kMessages = 5;
  for (uint64_t key = 0; key < 50; ++key) {
    in_threads(2, [&](int rank) {
      if (rank == 1) CHECK(eventually([&] { return cluster.is_asleep(0); }));
      ProgramBuilder program(2);
      for (uint32_t chunk = 0; chunk < kMessages; ++chunk)
        rank == 0 ? program.recv(1, chunk) : program.send(0, chunk);
      Plan plan;
      plan.program = program.done();
      plan.layout[kData] = equal_layout(64, kMessages);
      const auto sealed =
          seal(std::move(plan), DType::kFloat32, FoldOp::kSum, 1, 64, "five messages");
      Bytes memory(64 * kMessages, static_cast<std::byte>(rank));
      const auto& mesh = cluster.meshes[static_cast<size_t>(rank)];
      const auto call = mesh->post(*cluster.groups[static_cast<size_t>(rank)],
                                   Posting{sealed, key, {{memory.data()}}, now_ns() + kPatience});
      CHECK(mesh->wait(*call, kPatience));
      CHECK(memory == Bytes(64 * kMessages, std::byte{1}));
    });
  }
}

TEST("a sleeper waiting for several messages wakes for the first of a call made meanwhile") {
  Cluster cluster(3, 3);
  for (uint64_t key = 0; key < 100; key += 2) {
    std::thread waiter([&] { cluster.run(0, small(key)); });  // for one message of each other rank
    CHECK(eventually([&] { return cluster.is_asleep(0); }));
    Job job = from_rank_0(key + 1, 64);
    job.root = 1;
    const auto meanwhile = cluster.post(0, job, true);
    cluster.run(1, job);
    CHECK(eventually([&] { return meanwhile->call->finished.load(); }));
    cluster.run(2, job);
    std::thread last([&] { cluster.run(2, small(key)); });
    cluster.run(1, small(key));
    last.join();
    waiter.join();
  }
}

TEST("a waiter that leaves does not remove another waiter's alarm") {
  Cluster cluster(2, 2);
  for (uint64_t key = 0; key < 100; key += 2) {
    std::atomic<bool> first_is_done{false};
    std::thread first([&] {
      cluster.run(0, small(key));
      first_is_done = true;
    });
    std::thread second([&] { cluster.run(0, small(key + 1)); });
    CHECK(eventually([&] { return cluster.is_asleep(0); }));
    cluster.run(1, small(key));
    CHECK(eventually([&] { return first_is_done.load(); }));
    cluster.run(1, small(key + 1));
    first.join();
    second.join();
  }
}

TEST("many threads on each rank all finish their calls with the right results") {
  for (const auto& [per_host, spin_ns] : {std::pair{3, int64_t{0}},
                                          {3, 50 * kSecond / 1'000'000},
                                          {2, int64_t{0}},
                                          {1, int64_t{0}}}) {
    Cluster cluster(3, per_host, spin_ns);
    constexpr int kThreads = 4;
    in_threads(3 * kThreads, [&](int each) {
      const int rank = each % 3;
      FakeRandom random(static_cast<uint64_t>(each / 3));  // the same for all ranks
      for (uint64_t n = 0; n < seeds(20); ++n) {
        const uint64_t key = kNamed | static_cast<uint64_t>(each / 3) << 32 | n;
        Job job = random_job(random, key, 3, 60'000);
        job.segment_bytes = 4096;
        cluster.run(rank, job);
      }
    });
  }
}

TEST("a thread that waits for any call to end learns of each, in whatever order they end") {
  Cluster cluster(2, 2);
  constexpr uint64_t kCalls = 50;
  std::vector<std::unique_ptr<Cluster::Part>> parts;
  for (uint64_t key = 0; key < kCalls; ++key) parts.push_back(cluster.post(0, small(key), true));
  std::atomic<uint64_t> n_seen{0};
  std::thread watcher([&] {
    while (n_seen < kCalls) {
      const int64_t n =
          cluster.meshes[0]->wait_finished(static_cast<int64_t>(n_seen.load()), kPatience);
      CHECK(n >= 0);
      n_seen = static_cast<uint64_t>(n);
    }
  });
  for (uint64_t n = 0; n < kCalls; ++n) {  // the last first
    cluster.run(1, small(kCalls - 1 - n));
    CHECK(eventually([&] { return n_seen == n + 1; }));
  }
  watcher.join();
}

TEST("an idle rank receives an abort and a goodbye") {
  for (const int per_host : {2, 1}) {
    Cluster cluster(2, per_host);
    cluster.run_all(small(1));
    cluster.meshes[0]->abort_group(*cluster.groups[0], "enough");
    CHECK(eventually(
        [&] { return cluster.meshes[1]->abort_of(*cluster.groups[1]).fault == Fault::kClosed; }));
  }
}

TEST("an abort that arrives while a rank leaves its last call is still received") {
  Cluster cluster(2, 2);
  std::atomic<uint64_t> n_notified{0};
  in_threads(2, [&](int rank) {
    Mesh& mesh = *cluster.meshes[static_cast<size_t>(rank)];
    const auto plan = plan_of(small(0), rank, 2);
    for (uint64_t id = 100; id < 3100; ++id) {
      Group& group = mesh.add_group(id, {0, 1});
      std::array<float, 4> data{};
      const auto call = mesh.post(
          group,
          Posting{plan, 1, {{reinterpret_cast<std::byte*>(data.data())}}, now_ns() + kPatience});
      while (!mesh.wait(*call, kPatience)) {
      }
      if (rank == 0) mesh.abort_group(group, "enough");
      if (rank == 1) {
        CHECK(eventually([&] { return mesh.abort_of(group).fault == Fault::kClosed; }));
        n_notified++;
      }
      if (rank == 0) CHECK(eventually([&] { return n_notified == id - 99; }));
    }
  });
}

TEST("a rank far ahead of the others is not evicted, and sends them no more than fits") {
  Cluster cluster(2, 2);
  constexpr uint64_t kCalls = 70'000;  // more than a rank keeps frames of
  std::atomic<bool> is_far{false};
  std::atomic<uint64_t> n_wrong{0};
  in_threads(2, [&](int rank) {
    Mesh& mesh = *cluster.meshes[static_cast<size_t>(rank)];
    Group& group = *cluster.groups[static_cast<size_t>(rank)];
    if (rank == 1) CHECK(eventually([&] { return is_far.load(); }));
    std::vector<std::array<float, 4>> data(kCalls, {1, 2, 3, 4});
    std::vector<std::shared_ptr<Call>> calls;
    const auto own = plan_of(small(0), rank, 2);
    for (uint64_t key = 0; key < kCalls; ++key) {
      auto* memory = reinterpret_cast<std::byte*>(data[key].data());
      // Rank 1 makes them in the opposite order: it waits for the calls that rank 0 holds back.
      const uint64_t named = rank == 0 ? key : kCalls - 1 - key;
      calls.push_back(
          mesh.post(group, Posting{own, named, {{memory}}, now_ns() + kPatience, true}));
    }
    is_far = true;
    for (uint64_t key = 0; key < kCalls; ++key) {
      while (!mesh.wait(*calls[key], kPatience)) {
      }
      if (calls[key]->error || data[key] != std::array<float, 4>{2, 4, 6, 8}) n_wrong++;
    }
  });
  CHECK_EQ(n_wrong.load(), 0);
}

TEST("closing a mesh ends the waits of other threads on it") {
  for (const int per_host : {2, 1}) {
    Cluster cluster(2, per_host);
    const auto part = cluster.post(0, small(1));
    std::thread waiter([&] { CHECK(!cluster.wait(0, *part)); });
    std::thread watcher([&] { cluster.meshes[0]->wait_finished(0, kPatience); });
    CHECK(eventually([&] { return cluster.is_asleep(0); }));
    cluster.meshes[0]->close();
    waiter.join();
    watcher.join();
    CHECK(part->call->error.fault == Fault::kClosed);
  }
}

TEST("a call of a group that is made while its mesh closes ends at once") {
  Cluster cluster(2, 2);
  cluster.meshes[0]->close();
  cluster.groups[0] = &cluster.meshes[0]->add_group(99, {0, 1});
  const auto part = cluster.post(0, small(1));
  CHECK(part->call->finished);
  CHECK(part->call->error.fault == Fault::kClosed);
}

TEST("a wait lasts as long as requested, even where there is always work to do") {
  Cluster cluster(1, 1);
  constexpr uint64_t kBytes = 256u << 20;  // to copy, which takes long
  ProgramBuilder program(1);
  program.copy(0, 0, kInput, kOutput);
  Plan plan;
  plan.program = program.done();
  plan.layout[kInput] = plan.layout[kOutput] = equal_layout(kBytes, 1);
  const auto sealed = seal(std::move(plan), DType::kFloat32, FoldOp::kSum, 1, 128u << 10, "copy");
  Bytes from(kBytes, std::byte{3});
  const std::unique_ptr<std::byte[]> into(new std::byte[kBytes]);
  const auto call = cluster.meshes[0]->post(
      *cluster.groups[0],
      Posting{sealed, 1, {{}, {from.data()}, {into.get()}}, now_ns() + kPatience});
  CHECK(!cluster.meshes[0]->wait(*call, 1000));
  CHECK(!call->finished);
  CHECK(eventually([&] { return cluster.meshes[0]->wait(*call, kSecond); }));
  CHECK(into[kBytes - 1] == std::byte{3});
}

}  // namespace
}  // namespace shoal::test
