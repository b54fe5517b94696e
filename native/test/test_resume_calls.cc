// Calls over links that lose all their paths: they wait, continue and end right; and a rank that is
// really gone is detected in time.
#include "test/check.h"
#include "test/faults.h"

namespace shoal::test {
namespace {

World::Options resumed(uint64_t seed, uint32_t n_paths = 1) {
  World::Options options = options_for(seed);
  options.net.shares_memory = false;
  options.net.n_paths = n_paths;
  options.net.longest_remake = 30;
  return options;
}

TEST("calls succeed whatever paths break in the middle of them, even all at once") {
  uint64_t n_cut = 0;
  for (uint64_t seed = 0; seed < seeds(80); ++seed) {
    const int size = 2 + static_cast<int>(seed % 4);
    World::Options options = resumed(seed, 1 + static_cast<uint32_t>(seed / 4 % 3));
    options.net.begins_unlinked = seed % 3 == 0;
    options.net.path_cuts = 0.03;
    options.net.path_mutes = seed % 2 == 0 ? 0 : 0.001;
    World world(size, options);
    FakeRandom random(seed);
    std::vector<TestCall*> calls;
    for (uint64_t key = 0; key < 6; ++key) {
      const Job job = random_job(random, key, size, 3000);
      for (int rank = 0; rank < size; ++rank) calls.push_back(&world.post(rank, job));
    }
    CHECK(world.run_all(60'000));
    for (size_t at = 0; at < calls.size(); ++at) {
      CHECK_EQ(calls[at]->error.text, "");
      CHECK(calls[at]->result == expected(calls[at]->job, static_cast<int>(at) % size, size));
    }
    CHECK_EQ(world.net.violation(), "");
    n_cut += world.net.n_paths_cut();
  }
  CHECK(n_cut > 200);
}

TEST("a rank that dies while its links are suspended is lost to all, with the reason") {
  int n_lost = 0;
  for (uint64_t seed = 0; seed < seeds(30); ++seed) {
    World::Options options = resumed(seed);
    options.net.longest_remake = 200;
    World world(3, options);
    std::vector<TestCall*> calls;
    for (int rank = 0; rank < 3; ++rank) calls.push_back(&world.post(rank, large()));
    world.run_steps(static_cast<int>(seed % 20));
    for (const int peer : {0, 2}) world.net.cut(1, peer);
    world.run_steps(5);
    world.kill(1);
    const int64_t died_ns = world.now;
    CHECK(world.run_all(500));
    for (const int rank : {0, 2}) {
      const TestCall& call = *calls[static_cast<size_t>(rank)];
      if (call.ok()) continue;
      n_lost++;
      CHECK(call.error.fault == Fault::kPeerLost);
      CHECK_EQ(call.error.peer, 1);
      CHECK(call.finished_ns - died_ns < 500 * kMillisecond);
      CHECK(has(call.error.text, "nobody listens there any more"));
    }
  }
  CHECK(n_lost > 40);
}

TEST("a network cut shorter than the time to resume fails no call, silent or not") {
  for (const bool mute : {true, false}) {
    World::Options options = resumed(1);
    options.net.delays = options.net.splits = 0;
    World world(2, options);
    world.run_steps(1000);
    const TestCall& one = world.post(0, large());
    const TestCall& other = world.post(1, large());
    world.run_steps(1);
    world.net.options.longest_remake = 7000;  // longer than a silent rank lives
    mute ? world.net.mute_path(0, 1, 0) : world.net.cut_path(0, 1, 0);
    CHECK(world.run_all(16'000));
    CHECK(one.result == expected(one.job, 0, 2));
    CHECK(other.result == expected(other.job, 1, 2));
  }
}

TEST("a rank that leaves during a network cut has delivered everything it reported as sent") {
  for (const bool mute : {true, false}) {
    World::Options options = resumed(1, mute ? 2 : 1);
    options.net.longest_remake = 3000;
    World world(2, options);
    Job job = large(Kind::kDirectBroadcast, 10);
    world.post(0, job);
    world.post(1, job);
    CHECK(world.run_all());
    for (uint32_t path = 0; path < options.net.n_paths; ++path)
      mute ? world.net.mute_path(0, 1, path) : world.net.cut_path(0, 1, path);
    for (job.key = 1; job.key <= 200; ++job.key) world.post(0, job);
    CHECK(world.run_all());
    world.leave(0);
    for (job.key = 1; job.key <= 200; ++job.key) {
      const TestCall& call = world.post(1, job);
      CHECK(world.run_all(100));
      CHECK(call.result == expected(job, 1, 2));
    }
  }
}

TEST("a longer network cut loses the peer after the time to resume, with this error") {
  World::Options options = resumed(1);
  options.net.longest_remake = 100'000;
  World world(2, options);
  const TestCall& call = world.post(0, large());
  world.net.cut_path(0, 1, 0);
  const int64_t cut_ns = world.now;
  CHECK(world.run_all(11'000));
  CHECK(call.finished_ns - cut_ns >= 10 * kSecond);
  CHECK(call.finished_ns - cut_ns < 10'500 * kMillisecond);
  CHECK(has(call.error.text, "no connection could be made again for 10."));
}

TEST("a peer that resumes is listened to as long as any other before it counts as silent") {
  World::Options options = resumed(1);
  options.net.longest_remake = 1;
  World world(2, options);
  world.run_steps(500);
  world.stop(1);
  world.run_steps(4000);
  world.net.cut_path(0, 1, 0);
  world.run_steps(4000);  // 8 s of silence, half of them on a new path
  CHECK(world.engine(0).state_of(1) == Engine::PeerState::kAlive);
  world.run_steps(2000);
  CHECK(world.engine(0).state_of(1) == Engine::PeerState::kLost);
}

TEST("a stopped process gets more time than a host that confirms nothing") {
  for (const bool is_cut : {true, false}) {
    World::Options options = resumed(1);
    options.engine.take_for_dead_after(1200 * kMillisecond);
    World world(2, options);
    world.run_steps(500);
    const int64_t since = world.now;
    is_cut ? world.net.mute_path(0, 1, 0) : world.stop(1);
    CHECK(world.run([&] { return world.engine(0).state_of(1) == Engine::PeerState::kLost; }));
    const int64_t after_ns = world.now - since;
    CHECK(after_ns > (is_cut ? 800 : 2600) * kMillisecond);  // it was heard up to 300 ms before
    CHECK(after_ns < (is_cut ? 1500 : 3300) * kMillisecond);
  }
}

}  // namespace
}  // namespace shoal::test
