// Ranks that leave in good order: data that they sent still counts, and every rank that needs more
// from them gets an error.
#include "test/check.h"
#include "test/faults.h"

namespace shoal::test {
namespace {

World::Options calm(uint64_t seed) {
  World::Options options;
  options.net.seed = seed;
  options.net.shares_memory = seed % 2 == 1;
  options.net.delays = options.net.splits = 0.3;
  return options;
}

TEST("a rank may leave once its own calls are done, and the others still finish theirs") {
  for (uint64_t seed = 0; seed < seeds(60); ++seed) {
    const int size = 2 + static_cast<int>(seed % 5);
    World world(size, calm(seed));
    FakeRandom random(seed);
    std::vector<std::vector<TestCall*>> calls(static_cast<size_t>(size));
    for (uint64_t key = 0; key < 4; ++key) {
      const Job job = random_job(random, key, size, 500);
      for (int rank = 0; rank < size; ++rank)
        calls[static_cast<size_t>(rank)].push_back(&world.post(rank, job));
    }
    std::vector<bool> gone(static_cast<size_t>(size), false);
    CHECK(world.run([&] {
      for (size_t rank = 0; rank < gone.size(); ++rank) {
        const bool done = std::all_of(calls[rank].begin(), calls[rank].end(),
                                      [](const TestCall* call) { return call->finished; });
        if (gone[rank] || !done) continue;
        world.leave(static_cast<int>(rank));
        gone[rank] = true;
      }
      return world.n_unfinished() == 0;
    }));
    for (int rank = 0; rank < size; ++rank)
      for (const TestCall* call : calls[static_cast<size_t>(rank)]) {
        if (call->ok() && call->result == expected(call->job, rank, size)) continue;
        fail(__FILE__, __LINE__,
             "seed " + std::to_string(seed) + ", rank " + std::to_string(rank) + ", " +
                 call->job.descriptor() + ": " + call->error.text);
      }
  }
}

TEST("a small broadcast is received even if its root left before it was asked for") {
  World world(2, {});
  const Job job = large(Kind::kDirectBroadcast, 10);
  CHECK(world.post(0, job).handle != nullptr);
  CHECK(world.run_all(10));
  world.leave(0);
  world.run_steps(20);
  const TestCall& late = world.post(1, job);
  CHECK(world.run_all(10));
  CHECK(late.result == expected(job, 1, 2));
}

TEST("a group made after a member left serves the others and delivers that member's data") {
  World world(3, {});
  const Job job = large(Kind::kDirectBroadcast, 10);  // from rank 0, eagerly
  world.post_in(0, world.add_group(0, 60, {0, 1}), job);
  CHECK(world.run_all(20));
  world.leave(0);
  world.run_steps(20);
  const TestCall& late = world.post_in(1, world.add_group(1, 60, {0, 1}), job);
  CHECK(world.run_all(20));
  CHECK(late.result == expected(job, 1, 2));
  // Of three ranks: the two that remain exchange a message.
  Job between = job;
  between.root = 1;
  std::vector<TestCall*> calls;
  ProgramBuilder send(3), recv(3);
  send.send(2, 0);
  recv.recv(1, 0);
  for (const int rank : {1, 2}) {
    Plan plan;
    plan.program = (rank == 1 ? send : recv).done();
    plan.layout[kData] = equal_layout(40, 1);
    const auto sealed = seal(std::move(plan), DType::kFloat32, FoldOp::kSum, 1, 64, "a message");
    calls.push_back(&world.post_plan(rank, world.add_group(rank, 61, {0, 1, 2}), between, sealed,
                                     rank == 1 ? input_of(between, 0, 2) : Bytes()));
  }
  CHECK(world.run_all(50));
  for (const TestCall* call : calls) CHECK(call->ok());
  CHECK(calls[1]->result == input_of(between, 0, 2));
}

TEST("when a rank leaves a group that still needs it, every other rank learns of it") {
  for (const Kind kind : {Kind::kRingAllReduce, Kind::kShardedAllReduce, Kind::kChainBroadcast}) {
    for (const bool posts_first : {true, false}) {
      World world(5, {});
      std::vector<TestCall*> calls;
      const auto post = [&] {
        for (const int rank : {1, 2, 3, 4}) calls.push_back(&world.post(rank, large(kind)));
      };
      if (posts_first) post();
      world.run_steps(5);
      world.leave(0);
      world.run_steps(5);
      if (!posts_first) post();
      CHECK(world.run_all(200));
      for (const TestCall* call : calls) {
        CHECK(call->error.fault == Fault::kPeerLost);
        CHECK_EQ(call->error.peer, 0);
        CHECK(has(call->error.text, "left the group"));
      }
    }
  }
}

TEST("an engine destroyed before its calls leaves them to their owners") {
  World world(3, options_for(0));
  std::vector<std::shared_ptr<Call>> kept;
  for (int rank = 0; rank < 3; ++rank) kept.push_back(world.post(rank, large()).handle);
  world.run_steps(3);
  world.engines.clear();
  kept.clear();
}

}  // namespace
}  // namespace shoal::test
