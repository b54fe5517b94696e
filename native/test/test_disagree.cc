// Calls that differ, and groups that are ended on purpose: every rank gets an error text, and links
// and allowances serve other groups as before.
#include "test/check.h"
#include "test/faults.h"

namespace shoal::test {
namespace {

// ---- disagreement

void try_mismatch(int size, const std::vector<Job>& wanted, const World::Options& options) {
  World world(size, options);
  std::vector<TestCall*> calls;
  for (int rank = 0; rank < size; ++rank)
    calls.push_back(&world.post(rank, wanted[static_cast<size_t>(rank)]));
  CHECK(world.run_all(2000));
  for (const TestCall* call : calls) {
    CHECK(call->error.fault == Fault::kMismatch);
    int n_named = 0;
    for (int rank = 0; rank < size; ++rank) n_named += has(call->error.text, World::name(rank));
    CHECK_EQ(n_named, 2);
    CHECK(has(call->error.text, wanted.front().descriptor()));
    CHECK(has(call->error.text, wanted.back().descriptor()));
  }
}

TEST("calls that differ fail on every rank with an error that names both sides") {
  for (uint64_t seed = 0; seed < seeds(40); ++seed) {
    const int size = 2 + static_cast<int>(seed % 4);
    const uint64_t n_elems = seed % 3 == 0 ? 5 : 3000;
    std::vector<Job> wanted(static_cast<size_t>(size), large(Kind::kShardedAllReduce, n_elems));
    wanted.back().n_elems++;
    try_mismatch(size, wanted, options_for(seed));
    wanted.back() = wanted.front();
    wanted.back().op = FoldOp::kMax;
    try_mismatch(size, wanted, options_for(seed));
    wanted.back() = wanted.front();
    wanted.back().kind = Kind::kDirectAllGather;
    try_mismatch(size, wanted, options_for(seed));
  }
}

constexpr Subject subject_of(uint32_t averager, uint32_t step, uint32_t buffer) {
  return averager << 24 | step << 10 | buffer;
}

TEST("calls of one kind with different subjects fail with an error that names both") {
  const Subject ours = subject_of(2, 300, 7);
  for (const Subject theirs : {subject_of(1, 300, 7), subject_of(2, 301, 7), subject_of(2, 300, 6)})
    for (uint64_t seed = 0; seed < seeds(20); ++seed) {
      const int size = 2 + static_cast<int>(seed % 3);
      World world(size, options_for(seed));
      Job job = large(Kind::kShardedAllReduce, seed % 2 == 0 ? 5 : 3000);
      std::vector<TestCall*> calls;
      for (int rank = 0; rank < size; ++rank) {
        job.subject = rank == size - 1 ? theirs : ours;
        calls.push_back(&world.post(rank, job));
      }
      CHECK(world.run_all(2000));
      for (const TestCall* call : calls) {
        CHECK(call->error.fault == Fault::kMismatch);
        CHECK(has(call->error.text, job.descriptor() + " for averager 2, step 300, buffer 7"));
        CHECK(has(call->error.text, job.descriptor() + words_for(theirs)));
      }
    }
}

TEST("a call with another subject than one that has ended here is detected") {
  World world(2, {});
  Job job = large(Kind::kDirectBroadcast, 1);
  job.subject = subject_of(1, 2, 3);
  const TestCall& root = world.post(0, job);
  CHECK(world.run_all(10));
  job.subject = subject_of(1, 3, 3);
  const TestCall& late = world.post(1, job);
  CHECK(world.run_all(100));
  CHECK(root.ok());
  CHECK(late.error.fault == Fault::kMismatch);
  CHECK(has(late.error.text, "averager 1, step 2, buffer 3"));
  CHECK(has(late.error.text, "averager 1, step 3, buffer 3"));
}

TEST("two ranks that each wait for a small broadcast of the other find out within a second") {
  for (const bool shares_memory : {false, true}) {
    World::Options options;
    options.net.shares_memory = shares_memory;
    World world(2, options);
    Job job = large(Kind::kDirectBroadcast, 1);
    job.root = 1;
    const TestCall& on_0 = world.post(0, job);
    job.root = 0;
    const TestCall& on_1 = world.post(1, job);
    CHECK(world.run_all(1000));
    CHECK(on_0.error.fault == Fault::kMismatch);
    CHECK_EQ(on_0.error.text, on_1.error.text);
    CHECK(has(on_0.error.text, "from rank 0"));
    CHECK(has(on_0.error.text, "from rank 1"));
  }
}

TEST("a call that differs from one that has ended here is detected") {
  World world(2, {});
  Job job = large(Kind::kDirectBroadcast, 1);
  const TestCall& root = world.post(0, job);
  CHECK(world.run_all(10));  // the root had only to send
  job.n_elems = 2;
  const TestCall& late = world.post(1, job);
  CHECK(world.run_all(100));
  CHECK(root.ok());
  CHECK(late.error.fault == Fault::kMismatch);
  CHECK(world.groups[0]->life.why().fault == Fault::kMismatch);
}

TEST("a call that differs from one whose caller has left fails without waiting") {
  for (const bool posts_first : {true, false}) {
    World world(3, {});
    Job job = large(Kind::kDirectBroadcast, 1);
    world.post(0, job);
    CHECK(world.run_all(10));
    job.n_elems = 2;
    world.net.options.delays = 1;
    if (posts_first) world.post(1, job);
    world.leave(0);
    world.run_steps(20);
    const TestCall& late = world.post(posts_first ? 2 : 1, job);
    CHECK(world.run_all(100));
    CHECK(late.error.fault == Fault::kMismatch || posts_first);
    CHECK(late.error.fault == Fault::kMismatch || late.error.fault == Fault::kPeerLost);
    CHECK_EQ(late.error.peer, 0);
  }
}

TEST("a rank that posts after the others disagreed fails at once with their error") {
  World world(3, {});
  const TestCall& on_0 = world.post(0, large());
  world.post(1, large(Kind::kRingAllReduce, 2000));
  CHECK(world.run_all(200));
  world.run_steps(20);
  const TestCall& on_2 = world.post(2, large());
  CHECK(on_2.finished);
  CHECK_EQ(on_2.error.text, on_0.error.text);
}

TEST("a peer's name for a call is printed without its control characters") {
  World world(2, {});
  Job job = large(Kind::kDirectAllReduce, 4);
  Plan plan = *plan_of(job, 1, 2);
  const auto odd = seal(plan, job.dtype, job.op, 1, 64, "all_\x1b[31mreduce \xff\xfe");
  const TestCall& call = world.post(0, job);
  world.post_plan(1, *world.groups[1], job, odd, input_of(job, 1, 2));
  CHECK(world.run_all(200));
  CHECK(has(call.error.text, "all_?[31mreduce ??"));
}

// ---- abort

TEST("an abort reaches every rank with its reason") {
  for (uint64_t seed = 0; seed < seeds(20); ++seed) {
    World world(5, options_for(seed));
    std::vector<TestCall*> calls;
    for (int rank = 0; rank < 5; ++rank) calls.push_back(&world.post(rank, large()));
    world.run_steps(static_cast<int>(seed % 8));
    world.engine(3).abort_group(*world.groups[3], {Fault::kClosed, 3, "the operator said stop"},
                                true);
    CHECK(world.run_all(200));
    for (const TestCall* call : calls) {
      CHECK(call->error.fault == Fault::kClosed);
      CHECK_EQ(call->error.peer, 3);
      CHECK_EQ(call->error.text, "the operator said stop");
      CHECK(has(call->error.doing, "all_reduce by ring"));
    }
    CHECK(world.is_untouched());
    CHECK_EQ(world.net.violation(), "");
  }
}

TEST("an abort does not wait for calls of other groups, however busy they are") {
  World::Options options;
  options.idles = 0;
  World world(2, options);
  Group* other[2];
  for (const int rank : {0, 1}) other[rank] = &world.add_group(rank, 60, {0, 1});
  for (uint64_t key = 0; key < 40; ++key)
    for (const int rank : {0, 1}) {
      Job job = large(Kind::kRingAllReduce, 40'000);
      job.key = key;
      world.post_in(rank, *other[rank], job);
    }
  const TestCall& call = world.post(1, large());
  world.run_steps(2);
  world.engine(0).abort_group(*world.groups[0], {Fault::kClosed, 0, "stop"}, true);
  CHECK(world.run([&] { return call.finished; }, 30));
  CHECK(world.n_unfinished() > 40);  // they were busy all the time
}

TEST("an abort of a group that this rank has yet to make fails its calls at once") {
  World world(2, {});
  Group& group = world.add_group(0, 99, {0, 1});
  world.engine(0).abort_group(group, {Fault::kClosed, 0, "gone before it began"}, true);
  world.run_steps(10);
  const TestCall& call = world.post_in(1, world.add_group(1, 99, {0, 1}), large());
  CHECK(call.finished);
  CHECK_EQ(call.error.text, "gone before it began");
}

TEST("an abort by a rank outside the group blames that rank and no member") {
  World world(3, {});
  Group& group = world.add_group(0, 99, {0, 1});
  world.add_group(1, 99, {0, 1});
  // Rank 2 believes it is a member.
  Group& alien = world.add_group(2, 99, {0, 1, 2});
  world.engine(2).abort_group(alien, {Fault::kClosed, 2, "mine"}, true);
  world.run_steps(20);
  CHECK(!group.life.has_ended());
  CHECK(world.engine(0).state_of(2) == Engine::PeerState::kLost);
  CHECK(world.engine(0).state_of(1) == Engine::PeerState::kAlive);
}

TEST("after an abort the links serve other groups as before, with all their credit") {
  for (uint64_t seed = 0; seed < seeds(20); ++seed) {
    World::Options options = options_for(seed);
    options.engine.staging_bytes = 24 << 10;  // a small eager allowance
    options.slot_quota = 2;
    World world(3, options);
    for (uint64_t id = 100; id < 120; ++id) {
      std::vector<Group*> groups;
      for (int rank = 0; rank < 3; ++rank) groups.push_back(&world.add_group(rank, id, {0, 1, 2}));
      for (uint64_t key = 0; key < 3; ++key) {
        Job job =
            large(key == 0 ? Kind::kDirectAllReduce : Kind::kShardedAllReduce, key == 0 ? 10 : 500);
        job.key = key;
        // Only two of three ranks post the last calls.
        for (int rank = key == 2 ? 1 : 0; rank < 3; ++rank)
          world.post_in(rank, *groups[static_cast<size_t>(rank)], job);
      }
      world.run_steps(static_cast<int>(seed % 10));
      world.engine(1).abort_group(*groups[1], {Fault::kClosed, 1, "enough"}, true);
      CHECK(world.run_all(200));
      if (id % 2 == 0)
        for (int rank = 0; rank < 3; ++rank)
          world.engine(rank).drop_group(*groups[static_cast<size_t>(rank)]);
    }
    std::vector<TestCall*> calls;
    for (uint64_t key = 0; key < 20; ++key) {
      Job job = large(key % 2 == 0 ? Kind::kDirectAllReduce : Kind::kShardedAllReduce,
                      key % 2 == 0 ? 10 : 500);
      job.key = key;
      for (int rank = 0; rank < 3; ++rank) calls.push_back(&world.post(rank, job));
    }
    CHECK(world.run_all(2000));
    for (size_t at = 0; at < calls.size(); ++at)
      CHECK(calls[at]->result == expected(calls[at]->job, static_cast<int>(at) % 3, 3));
    for (int rank = 0; rank < 3; ++rank) CHECK_EQ(world.engine(rank).staging().used(), 0u);
  }
}

TEST("the eager credit of failed calls is returned, so that later calls need no grant") {
  World::Options options;
  options.engine.staging_bytes = 16 << 10;  // a handful of small messages to each peer
  World world(3, options);
  for (uint64_t id = 100; id < 200; ++id) {
    std::vector<Group*> groups;
    for (int rank = 0; rank < 3; ++rank) groups.push_back(&world.add_group(rank, id, {0, 1, 2}));
    const Job job = large(Kind::kDirectAllReduce, 10);
    // Rank 2's data is folded after rank 0's, which is never sent; or it was never asked for; or it
    // arrives after the group has ended.
    world.post_in(2, *groups[2], job);
    if (id % 3 == 0) world.post_in(1, *groups[1], job);
    if (id % 3 != 2) world.run_steps(10);
    world.engine(1).abort_group(*groups[1], {Fault::kClosed, 1, "enough"}, true);
    if (id % 6 >= 3) world.engine(1).drop_group(*groups[1]);
    CHECK(world.run_all(100));
    world.run_steps(10);
  }
  Job job = large(Kind::kDirectBroadcast, 10);
  job.root = 2;
  const TestCall& root = world.post(2, job);
  CHECK(world.run([&] { return root.finished; }, 10));  // no other rank has posted it
}

TEST("a group dropped with a call in flight fails the call and ignores its late frames") {
  World world(2, {});
  Group& on_0 = world.add_group(0, 50, {0, 1});
  Group& on_1 = world.add_group(1, 50, {0, 1});
  const TestCall& call = world.post_in(0, on_0, large());
  world.run_steps(2);
  world.engine(0).drop_group(on_0);
  CHECK(call.error.fault == Fault::kClosed);
  world.post_in(1, on_1, large(), world.now + kSecond);
  const Job job = large(Kind::kDirectAllReduce, 100);
  const TestCall& good_0 = world.post(0, job);
  const TestCall& good_1 = world.post(1, job);
  CHECK(world.run_all(3000));
  CHECK(good_0.result == expected(job, 0, 2));
  CHECK(good_1.result == expected(job, 1, 2));
}

}  // namespace
}  // namespace shoal::test
