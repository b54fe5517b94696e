// Sends to several hosts take turns: all of them leave, whatever the chunks, and a stopped host
// delays only the ranks that share a call with it.
#include <algorithm>
#include <string>

#include "test/check.h"
#include "test/world.h"

namespace shoal::test {
namespace {

constexpr int kSize = 4;

// The blocks of the ranks differ in length, and a reducer folds them in the order of the ranks.
Job uneven_job(FakeRandom& random, uint64_t key) {
  for (;;) {
    Job job = random_job(random, key, kSize, 400);
    if (job.is_uneven && job.descriptor().starts_with("reduce_scatter by direct")) return job;
  }
}

TEST("turns let all data of unequal chunks leave, including data that a link copies") {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    FakeRandom random(seed);
    World::Options options;
    options.net.seed = seed;
    options.net.delays = options.net.reports_late = 0.2;
    options.net.copied = seed % 3 * 32;  // none, short tails, or every second segment
    options.engine.staging_bytes = 16u << 10;
    World world(kSize, options);
    std::vector<std::pair<int, TestCall*>> calls;
    for (uint64_t key = 100; key < 104; ++key) {
      const Job job = uneven_job(random, key);
      for (const int rank : world.shuffled(kSize)) calls.emplace_back(rank, &world.post(rank, job));
    }
    CHECK(world.run_all());
    for (const auto& [rank, call] : calls)
      CHECK(call->ok() && call->result == expected(call->job, rank, kSize));
  }
}

constexpr size_t kSegment = 64;

// Five ranks with one frame at a time on each wire; rank 0 is in both groups.
struct TwoGroups {
  static World::Options options(uint64_t seed) {
    World::Options options;
    options.idles = 0;
    options.net.seed = seed;
    options.net.room = 1;
    options.net.copied = options.net.max_inline = 0;
    options.engine.heartbeat_ns = 3600 * kSecond;  // no rank is given up
    options.engine.dead_ns = options.engine.suspect_ns = options.engine.heartbeat_ns;
    return options;
  }

  explicit TwoGroups(uint64_t seed) : world(5, options(seed)) {
    for (const auto& [id, members] : {std::pair{kFirst, first}, std::pair{kOther, other}})
      for (const int rank : members) world.add_group(rank, id, members);
  }
  std::vector<TestCall*> post(uint64_t id, const std::vector<int>& members, uint64_t key,
                              size_t segment_bytes = kSegment) {
    Job job;
    job.kind = Kind::kShardedAllReduce;
    job.key = key;
    job.n_elems = segment_bytes == kSegment ? 6000 : 5 * segment_bytes;
    job.segment_bytes = segment_bytes;
    std::vector<TestCall*> calls;
    for (const int rank : members)
      calls.push_back(&world.post_in(rank, *world.engine(rank).group(id), job));
    return calls;
  }
  // The bytes of a call that are sent and not acknowledged.
  static size_t n_out(const TestCall& call) {
    size_t n_segments = 0;
    for (const uint32_t at : call.handle->turns.sends) {
      const StepState& state = call.handle->state[at];
      n_segments += state.started - state.done;
    }
    return n_segments * kSegment;
  }

  static constexpr uint64_t kFirst = 8, kOther = 9;
  const std::vector<int> first = {0, 1, 2}, other = {0, 3, 4};
  World world;
};

TEST("a stopped host delays no group without it") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    TwoGroups groups(seed);
    World& world = groups.world;
    world.engine(0).bound_out(2 * kSegment);
    const auto held_up = groups.post(TwoGroups::kFirst, groups.first, 1);
    CHECK(world.run([&] { return TwoGroups::n_out(*held_up[0]) >= 2 * kSegment; }));
    world.stop(1);
    world.run_steps(200);
    CHECK_EQ(TwoGroups::n_out(*held_up[0]), 2 * kSegment);  // all that may be out
    const auto calls = groups.post(TwoGroups::kOther, groups.other, 2);
    CHECK(world.run([&] { return calls[0]->finished && calls[1]->finished && calls[2]->finished; },
                    5000));
    CHECK(!held_up[0]->finished);
    for (size_t at = 0; at < calls.size(); ++at)
      CHECK(calls[at]->ok() &&
            calls[at]->result == expected(calls[at]->job, static_cast<int>(at), 3));
    world.go_on(1);
    CHECK(world.run_all());
    for (size_t at = 0; at < held_up.size(); ++at)
      CHECK(held_up[at]->ok() &&
            held_up[at]->result == expected(held_up[at]->job, static_cast<int>(at), 3));
  }
}

TEST("a turn longer than the limit on bytes out may still leave as one") {
  for (const size_t segment : {size_t{32} << 10, size_t{96} << 10}) {
    TwoGroups groups(1);
    World& world = groups.world;
    const std::vector<int> all = {0, 1, 2, 3, 4};
    for (const int rank : all) {
      world.add_group(rank, 10, all);
      world.engine(rank).bound_out(1);
    }
    const auto calls = groups.post(10, all, 1, segment);
    CHECK(world.run([&] { return TwoGroups::n_out(*calls[0]) > 0; }));
    for (const int rank : {1, 2, 3, 4}) world.stop(rank);
    world.run_steps(200);
    CHECK_EQ(TwoGroups::n_out(*calls[0]) / kSegment, segment == 32u << 10 ? 1U : 4U);
    for (const int rank : {1, 2, 3, 4}) world.go_on(rank);
    CHECK(world.run_all());
  }
}

TEST("the last of five calls that wait to send does not overtake the others") {
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    TwoGroups groups(seed);
    World& world = groups.world;
    for (int rank = 0; rank < 5; ++rank) world.engine(rank).bound_out(4 * kSegment);
    std::vector<TestCall*> earlier;
    for (uint64_t key = 1; key <= 4; ++key)
      earlier.push_back(groups.post(TwoGroups::kFirst, groups.first, key)[0]);
    world.run_steps(20);  // they are on their way
    const TestCall& last = *groups.post(TwoGroups::kFirst, groups.first, 5)[0];
    CHECK(world.run([&] { return last.finished; }));
    CHECK(std::ranges::count_if(earlier, [](auto* call) { return call->finished; }) >= 3);
    CHECK(world.run_all());
  }
}

TEST("calls whose groups share some peers all finish, however low the limit on bytes out") {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    World::Options options = TwoGroups::options(seed);
    options.net.room = seed % 3;
    options.net.delays = options.net.reports_late = 0.2;
    options.idles = 0.2;
    World world(5, options);
    const std::vector<std::vector<int>> members = {
        {0, 1, 2}, {0, 2, 3, 4}, {1, 2, 4}, {0, 1, 3, 4}};
    for (uint64_t id = 0; id < members.size(); ++id)
      for (const int rank : members[id]) world.add_group(rank, 20 + id, members[id]);
    for (int rank = 0; rank < 5; ++rank)
      world.engine(rank).bound_out(1 + world.random().below(6 * kSegment));
    for (uint64_t key = 1; key <= 3; ++key)
      for (uint64_t id = 0; id < members.size(); ++id) {
        Job job;
        job.kind = Kind::kShardedAllReduce;
        job.key = key;
        job.n_elems = world.random().below(600);
        job.segment_bytes = kSegment;
        for (const int rank : members[id])
          world.post_in(rank, *world.engine(rank).group(20 + id), job);
        world.run_steps(static_cast<int>(world.random().below(5)));
      }
    CHECK(world.run_all());
  }
}

}  // namespace
}  // namespace shoal::test
