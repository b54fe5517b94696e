// Links that complete puts, gets and releases late. A failed call is over for its caller when all
// of them have released its memory, and never later than their own end.
#include "test/check.h"
#include "test/faults.h"

namespace shoal::test {
namespace {

constexpr uint64_t kForEver = uint64_t{1} << 40;

World::Options letting_go_within(uint64_t n_steps) {
  World::Options options;
  options.net.releases_late = 1;
  options.net.longest_delay = n_steps;
  return options;
}

const Error kEnough = {Fault::kClosed, 0, "enough"};

// A failed call of rank 0, whose memory the links with its peers hold.
TestCall& failed(World& world) {
  TestCall& call = world.post(0, large(Kind::kDirectAllReduce));
  for (int rank = 1; rank < world.size(); ++rank) world.post(rank, call.job);
  world.engine(0).abort_group(*world.groups[0], kEnough, false);
  return call;
}

TEST("a failed call is finished when the last link has released its memory") {
  for (uint64_t seed = 0; seed < seeds(40); ++seed) {
    World::Options options = letting_go_within(30);
    options.net.seed = seed;
    options.net.shares_memory = seed % 2 == 1;
    World world(4, options);
    const TestCall& call = failed(world);
    CHECK(call.handle->ended);
    CHECK(!call.handle->finished);
    CHECK_EQ(world.engine(0).n_in_flight(), 0u);
    const uint32_t n_asked = call.handle->n_unreleased;
    CHECK(n_asked >= 3);
    CHECK(world.run([&] { return call.handle->n_unreleased < n_asked; }, 100));
    CHECK(call.handle->n_unreleased == 0 || !call.finished);
    CHECK(world.run([&] { return call.finished; }, 100));
    CHECK_EQ(call.handle->n_unreleased, 0u);
    CHECK_EQ(call.error.text, "enough");
    world.run_steps(50);
    CHECK(world.is_untouched());
    CHECK_EQ(world.net.violation(), "");
  }
}

TEST("scratch memory stays until the links have released it") {
  World world(3, letting_go_within(20));
  world.post(0, large(Kind::kDirectAllReduce));
  const TestCall* call = nullptr;
  for (const Recipe& recipe : Recipes::all().recipes()) {
    Job job = job_of(recipe, large());
    if (recipe.size != 3 || plan_of(job, 0, 3)->scratch_bytes == 0) continue;
    job.key = 50;
    for (int rank = 0; rank < 3; ++rank) {
      TestCall& one = world.post(rank, job);
      if (rank == 0) call = &one;
    }
    break;
  }
  CHECK(call != nullptr);
  CHECK(world.run([&] { return world.engine(0).scratch_bytes() > 0 || call->finished; }));
  CHECK(world.engine(0).scratch_bytes() > 0);
  world.engine(0).abort_group(*world.groups[0], kEnough, false);
  CHECK(world.engine(0).scratch_bytes() > 0);
  CHECK(world.run([&] { return call->finished; }, 200));
  CHECK(world.run([&] { return world.engine(0).scratch_bytes() == 0; }, 200));  // the other's too
}

TEST("a link that breaks has released all memory") {
  World world(3, letting_go_within(kForEver));
  const TestCall& call = failed(world);
  for (const int peer : {1, 2}) {
    CHECK(!call.finished);
    world.net.cut(0, peer);
    world.engine(0).link(peer)->pump(world.engine(0));
  }
  CHECK(call.finished);
}

TEST("a peer that is given up releases the memory that its links held") {
  World world(2, letting_go_within(kForEver));
  const TestCall& call = failed(world);
  world.engine(0).peer_lost(1, "is gone, a test says");
  CHECK(!call.finished);
  world.engine(0).progress();
  CHECK(call.finished);
}

TEST("close() ends the wait for every link") {
  World world(3, letting_go_within(kForEver));
  const TestCall& call = failed(world);
  world.run_steps(100);
  CHECK(!call.finished);
  world.engine(0).close();
  CHECK(call.finished);
}

TEST("a group may be forgotten while links still hold memory of its calls") {
  World world(2, letting_go_within(20));
  Group& group = world.add_group(0, 60, {0, 1});
  const TestCall& call = world.post_in(0, group, large());
  world.engine(0).drop_group(group);
  CHECK(!call.finished);
  CHECK(world.run([&] { return call.finished; }, 50));
}

TEST("a call that succeeds waits for no release") {
  World world(2, letting_go_within(kForEver));
  const TestCall& on_0 = world.post(0, large());
  const TestCall& on_1 = world.post(1, large());
  CHECK(world.run_all(500));
  CHECK(on_0.ok() && on_1.ok());
}

TEST("a get in progress when another rank ends the group is waited for") {
  for (uint64_t seed = 0; seed < seeds(20); ++seed) {
    World::Options options;
    options.net.seed = seed;
    options.net.shares_memory = true;
    options.net.max_inline = 64;
    options.net.moves_late = 1;
    options.shares_buffers = 0;  // through a slot: the sender does not notice
    options.idles = 0;
    World world(2, options);
    Job job = large(Kind::kDirectBroadcast, 100);
    job.segment_bytes = 4096;
    const TestCall& on_1 = world.post(1, job);
    world.step();
    const TestCall& on_0 = world.post(0, job);
    CHECK(world.run([&] { return on_0.ok(); }, 20));
    CHECK(!on_1.finished);
    world.engine(0).abort_group(*world.groups[0], kEnough, true);
    CHECK(world.run_all(50));
    CHECK(on_1.ok());
    CHECK(on_1.result == expected(job, 1, 2));
  }
}

}  // namespace
}  // namespace shoal::test
