// Ranks that connect at first use: which pairs connect, and the fate of ranks that are gone by
// then.
#include "test/check.h"
#include "test/faults.h"

namespace shoal::test {
namespace {

World::Options lazy(uint64_t seed) {
  World::Options options = options_for(seed);
  options.net.shares_memory = false;
  options.net.n_paths = 1;
  options.net.longest_remake = 30;
  options.net.begins_unlinked = true;
  return options;
}

int n_links(World& world, int rank) {
  int n = 0;
  for (int peer = 0; peer < world.size(); ++peer)
    n += peer != rank && world.engine(rank).link(peer) != nullptr &&
         !world.engine(rank).link(peer)->is_unlinked();
  return n;
}

TEST("idle ranks connect to no peer, for however long, and leave so") {
  World world(5, lazy(1));
  world.run_steps(30'000);
  for (int rank = 0; rank < 5; ++rank) CHECK_EQ(n_links(world, rank), 0);
  world.leave(2);
  world.run_steps(1000);
  for (const int rank : {0, 1, 3, 4}) {
    CHECK_EQ(n_links(world, rank), 0);
    CHECK(world.engine(rank).state_of(2) == Engine::PeerState::kAlive);
  }
}

TEST("a peer first used long after the start is listened to from then on") {
  World world(2, lazy(7));
  world.run_steps(60'000);
  const TestCall& one = world.post(0, large(Kind::kRingAllReduce, 100'000));
  CHECK(world.run([&] { return !world.engine(0).link(1)->is_suspended(); }, 1000));
  for (int n = 0; n < 1000; ++n) {
    world.step();
    CHECK(world.engine(0).state_of(1) == Engine::PeerState::kAlive);
  }
  const TestCall& other = world.post(1, large(Kind::kRingAllReduce, 100'000));
  CHECK(world.run_all(60'000));
  CHECK(one.ok() && other.ok());
}

TEST("a ring connects each rank to its two neighbours and sends heartbeats to no other rank") {
  World world(6, lazy(2));
  for (int rank = 0; rank < 6; ++rank) world.post(rank, large(Kind::kRingAllReduce));
  CHECK(world.run_all());
  world.run_steps(10'000);
  for (int rank = 0; rank < 6; ++rank) CHECK_EQ(n_links(world, rank), 2);
}

TEST("a peer that died before any connection is lost to all direct and indirect waiters") {
  for (uint64_t seed = 0; seed < seeds(30); ++seed) {
    const int size = 3 + static_cast<int>(seed % 5);
    const int victim = static_cast<int>(seed) % size;
    World world(size, lazy(seed));
    world.kill(victim);
    std::vector<TestCall*> calls;
    for (int rank = 0; rank < size; ++rank)
      if (rank != victim) calls.push_back(&world.post(rank, large(Kind::kRingAllReduce)));
    CHECK(world.run_all(3000));
    for (const TestCall* call : calls) {
      CHECK(call->error.fault == Fault::kPeerLost);
      CHECK_EQ(call->error.peer, victim);
      CHECK(has(call->error.text, "could not be connected to: nobody listens"));
    }
  }
}

TEST("a peer that died before any connection is lost to a rank that receives from anyone") {
  World world(4, lazy(3));
  world.kill(3);
  Plan plan;
  plan.program = point_to_point(0, 4, 1, 0);
  plan.layout[kData] = equal_layout(64, 1);
  const auto sealed = seal(std::move(plan), DType::kUint32, FoldOp::kSum, 1, 256, "message");
  Bytes memory(64);
  const auto call = world.engine(0).post(
      *world.groups[0], Message{sealed, false, -1, 5, memory.data(), World::kNever});
  CHECK(world.run([&] { return call->finished.load(); }, 3000));
  CHECK(call->error.fault == Fault::kPeerLost);
  CHECK_EQ(call->error.peer, 3);
}

// News of another group's end looks for rank 3, which no rank ever needed.
TEST("a peer that left before any connection fails only the calls that wait for it") {
  World world(4, lazy(4));
  Group& both = world.add_group(2, 60, {2, 3});
  Group& in_1 = world.add_group(1, 61, {1, 2, 3});
  Group& in_2 = world.add_group(2, 61, {1, 2, 3});
  world.leave(3);
  world.engine(2).abort_group(both, {Fault::kClosed, 2, "enough"}, true);
  CHECK(world.run([&] { return world.engine(2).state_of(3) == Engine::PeerState::kGone; }, 1000));
  CHECK(!in_2.life.has_ended());
  CHECK(!world.groups[2]->life.has_ended());
  const TestCall& one =
      world.post_in(1, world.add_group(1, 62, {1, 2}), large(Kind::kRingAllReduce));
  const TestCall& two =
      world.post_in(2, world.add_group(2, 62, {1, 2}), large(Kind::kRingAllReduce));
  CHECK(world.run_all(3000));
  CHECK(one.ok() && two.ok());
  // A rank that waits for it learns of its death at once.
  const TestCall& late = world.post_in(2, in_2, large(Kind::kRingAllReduce));
  CHECK(late.finished);
  CHECK(late.error.fault == Fault::kPeerLost);
  CHECK(has(late.error.text, "could not be connected to: nobody listens"));
  CHECK(world.run([&] { return in_1.life.has_ended(); }, 3000));
}

TEST("a third rank that never met the silent one answers for it within two seconds") {
  World world(4, lazy(5));
  const TestCall& one =
      world.post_in(0, world.add_group(0, 60, {0, 1}), large(Kind::kRingAllReduce));
  world.post_in(1, world.add_group(1, 60, {0, 1}), large(Kind::kRingAllReduce));
  CHECK(world.run_all());
  CHECK(one.ok());
  world.stop(1);
  const int64_t stopped_ns = world.now;
  const TestCall& call =
      world.post_in(0, world.add_group(0, 61, {0, 1}), large(Kind::kRingAllReduce));
  CHECK(world.run([&] { return call.finished; }, 12'000));
  CHECK(call.error.fault == Fault::kPeerLost);
  CHECK(call.finished_ns - stopped_ns >= 5 * kSecond);
  CHECK(call.finished_ns - stopped_ns < 8 * kSecond);
}

TEST("ranks that never met a dead peer do not dial it") {
  World world(8, lazy(6));
  for (const int rank : {0, 1})
    world.post_in(rank, world.add_group(rank, 60, {0, 1}), large(Kind::kRingAllReduce));
  CHECK(world.run_all());
  world.kill(1);
  const TestCall& call = world.post(0, large(Kind::kRingAllReduce));
  CHECK(world.run([&] { return call.finished; }, 3000));
  CHECK(world.run(
      [&] {
        for (int rank = 2; rank < 8; ++rank)
          if (world.engine(rank).state_of(1) != Engine::PeerState::kLost) return false;
        return true;
      },
      3000));
}

}  // namespace
}  // namespace shoal::test
