// Sends to several hosts take turns: all of them leave, whatever their chunks are like.
#include <string>

#include "test/check.h"
#include "test/world.h"

namespace shoal::test {
namespace {

constexpr int kSize = 4;

// Blocks of the ranks differ in length, and a reducer folds what comes in the order of the ranks.
Job uneven_job(FakeRandom& random, uint64_t key) {
  for (;;) {
    Job job = random_job(random, key, kSize, 400);
    if (job.is_uneven && job.descriptor().starts_with("reduce_scatter by direct")) return job;
  }
}

TEST("turns let all of unlike chunks leave, also those that a link copies") {
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

}  // namespace
}  // namespace shoal::test
