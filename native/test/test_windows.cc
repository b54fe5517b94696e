// Scratch of served calls, by segment: under a ceiling, and without any set of calls in each
// other's way.
#include "test/faults.h"
#include "test/pool_world.h"

namespace shoal::test {
namespace {

TEST("with room for a segment of each call and no more, all calls come to their end") {
  for (uint64_t seed = 0; seed < seeds(40); ++seed) {
    World::Options options = options_for(seed);
    options.engine.staging_bytes = 256;
    options.net.copied = options.net.max_inline = seed % 3 == 0 ? 0 : 64;
    options.net.room = seed % 4 == 0 ? 1 : 0;
    options.slot_quota = 1;
    FakeRandom random(seed);
    Pool pool(4, 1 + static_cast<int>(seed % 2), options);
    const int n_servers = pool.world.size() - 4;
    std::vector<PoolJob> jobs;
    for (uint64_t key = 1; key <= 6; ++key) {
      jobs.push_back(random_pool_job(random, 4, n_servers, key));
      if (options.net.shares_memory) jobs.back().codec = Codec::kIdentity;
      pool.serve(jobs.back());
    }
    // In an order of its own on each worker.
    for (const int rank : pool.world.shuffled(4))
      for (const int at : pool.world.shuffled(6)) {
        const PoolJob& job = jobs[static_cast<size_t>(at)];
        pool.calls.push_back({rank, job, &pool.post(rank, job)});
        if (pool.world.random().chance(0.3)) pool.world.step();
      }
    pool.check("seed " + std::to_string(seed));
    for (int rank = 4; rank < pool.world.size(); ++rank)
      CHECK_EQ(pool.world.engine(rank).scratch_bytes(), 0u);
  }
}

TEST(
    "a server of 16 workers and 8 calls holds no more than its ceiling, and gives all of it back") {
  World::Options options;
  options.net.max_inline = 16;
  options.idles = 0;
  options.engine.staging_bytes = 64 << 10;
  Pool pool(16, 1, options);
  Engine& server = pool.world.engine(16);
  PoolJob job{16, 1};
  job.n_elems = 16 * 16 * 24;  // 24 segments in each of 16 chunks: 192 KiB in 8 calls
  pool.serve(job);
  const size_t reserved = server.staging().reserved();
  for (job.key = 1; job.key <= 8; ++job.key) pool.post_all(job);
  size_t most = 0;
  CHECK(pool.world.run([&] {
    most = std::max(most, server.scratch_bytes());
    return pool.world.n_unfinished() == 0;
  }));
  pool.check("16 workers");
  CHECK(most > (24u << 10));  // it used what it may
  CHECK(most <= (32u << 10) + 8 * 64);
  // What lands now is not counted: one segment for each peer.
  CHECK(server.staging().peak() <= options.engine.staging_bytes + (8 + 16) * 64);
  CHECK_EQ(server.scratch_bytes(), 0u);
  CHECK_EQ(server.staging().used(), 0u);
  CHECK_EQ(server.staging().reserved(), reserved);
}

}  // namespace
}  // namespace shoal::test
