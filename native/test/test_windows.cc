// Scratch of served calls, by segment: under a ceiling, and without any deadlock between
// calls.
#include "test/faults.h"
#include "test/pool_world.h"

namespace shoal::test {
namespace {

TEST("with room for one segment of each call, all calls finish") {
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
    // In a random order on each worker.
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

TEST("a server of 16 workers and 8 calls stays within its ceiling and gives all of it back") {
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
  CHECK(most > (24u << 10));  // it used its share
  CHECK(most <= (32u << 10) + 8 * 64);
  // The segment that arrives now is not counted: one for each peer.
  CHECK(server.staging().peak() <= options.engine.staging_bytes + (8 + 16) * 64);
  CHECK_EQ(server.scratch_bytes(), 0u);
  CHECK_EQ(server.staging().used(), 0u);
  CHECK_EQ(server.staging().reserved(), reserved);
}

// Bytes that workers have sent to a server and it has not folded, in all calls.
uint64_t n_on_the_way(const Pool& pool, int server) {
  uint64_t n_segments = 0;
  for (const auto& posted : pool.calls)
    for (const StepState& state : posted.call->handle->state) n_segments += state.started;
  const Group& group = *pool.world.groups[static_cast<size_t>(server)];
  for (const auto& [key, call] : group.in_flight)
    for (size_t at = 0; at < call->state.size(); ++at)
      if (call->plan->program->steps[at].kind == StepKind::kRecv)
        n_segments -= call->state[at].done;
  return n_segments * 64;
}

TEST("where all workers send to one server, data in flight stays within its link's capacity") {
  for (uint64_t seed = 0; seed < seeds(10); ++seed) {
    World::Options options;
    options.net.seed = seed;
    options.net.max_inline = options.net.copied = 0;
    options.net.delays = options.net.reports_late = 0.2;
    options.idles = 0.2;
    Pool pool(16, 1, options);
    PoolJob job{16, 1, 1};
    job.n_elems = 16 * 16 * 24;
    pool.serve(job);
    constexpr uint64_t kOfWindow = 16 * 64;
    pool.world.engine(16).bound_out(kOfWindow);
    pool.post_all(job);
    uint64_t most = 0;
    CHECK(pool.world.run([&] {
      if (pool.world.engine(16).n_in_flight() == 1) most = std::max(most, n_on_the_way(pool, 16));
      return pool.world.n_unfinished() == 0;
    }));
    pool.check("seed " + std::to_string(seed));
    CHECK(most > kOfWindow);  // while one window fills, another is granted
    CHECK(most <= 2 * kOfWindow);
  }
}

TEST("data in flight to a server is not limited by its link where other peers get as much") {
  Pool pool(4, 4, {});
  PoolJob job{4, 4, 1};
  job.n_elems = 16 * 16 * 24;
  pool.serve(job);
  for (int rank = 4; rank < 8; ++rank) pool.world.engine(rank).bound_out(64);
  pool.post_all(job);
  uint64_t most = 0;
  CHECK(pool.world.run([&] {
    for (int rank = 4; rank < 8; ++rank)
      for (const auto& [key, call] : pool.world.groups[static_cast<size_t>(rank)]->in_flight) {
        CHECK(!call->windows.is_incast);
        most = std::max<uint64_t>(most, call->windows.n_held * 64);
      }
    return pool.world.n_unfinished() == 0;
  }));
  pool.check("4 workers, 4 servers");
  CHECK(most > 10 * 64);
}

TEST("calls of all workers to one server finish, however low the limit in flight") {
  for (uint64_t seed = 0; seed < seeds(20); ++seed) {
    World::Options options = options_for(seed);
    FakeRandom random(seed);
    Pool pool(5, 1 + static_cast<int>(seed % 2), options);
    for (int rank = 0; rank < pool.world.size(); ++rank)
      pool.world.engine(rank).bound_out(1 + random.below(1000));
    std::vector<PoolJob> jobs;
    for (uint64_t key = 1; key <= 4; ++key) {
      jobs.push_back(random_pool_job(random, 5, pool.world.size() - 5, key));
      if (options.net.shares_memory) jobs.back().codec = Codec::kIdentity;
      pool.serve(jobs.back());
    }
    for (const int rank : pool.world.shuffled(5))
      for (const int at : pool.world.shuffled(4)) {
        const PoolJob& job = jobs[static_cast<size_t>(at)];
        pool.calls.push_back({rank, job, &pool.post(rank, job)});
        if (pool.world.random().chance(0.3)) pool.world.step();
      }
    pool.check("seed " + std::to_string(seed));
    for (int rank = 5; rank < pool.world.size(); ++rank)
      CHECK_EQ(pool.world.engine(rank).inbound_bytes(), 0u);
  }
}

// No segment is taken before one that is earlier in its chunk, in proportion.
bool is_each_as_far(const Call& call) {
  const auto is_ahead = [](const Window& one, const Window& other) {
    return one.end() > 0 &&
           uint64_t{one.end() - 1} * other.n_segments > uint64_t{other.end()} * one.n_segments;
  };
  for (const Window& one : call.windows.of_chunk)
    for (const Window& other : call.windows.of_chunk)
      if (other.n_segments > 0 && is_ahead(one, other)) return false;
  return true;
}

TEST("windows of unequal chunks move over all of them evenly, within a small limit") {
  for (uint64_t seed = 0; seed < seeds(30); ++seed) {
    World::Options options = options_for(2 * seed);
    options.engine.staging_bytes = 64 * (2 + seed % 20);
    options.net.copied = options.net.max_inline = 0;
    Pool pool(3, 2, options);
    PoolJob job{3, 2};
    job.n_elems = 3000;
    job.is_uneven = true;
    job.seed = seed;
    pool.serve(job);
    for (job.key = 1; job.key <= 3; ++job.key) pool.post_all(job);
    bool are_alike = true;
    CHECK(pool.world.run([&] {
      for (const int rank : {3, 4})
        for (const auto& [key, call] : pool.world.groups[static_cast<size_t>(rank)]->in_flight)
          are_alike &= is_each_as_far(*call);
      return pool.world.n_unfinished() == 0;
    }));
    CHECK(are_alike);
    pool.check("seed " + std::to_string(seed));
    for (const int rank : {3, 4}) CHECK_EQ(pool.world.engine(rank).scratch_bytes(), 0u);
  }
}

}  // namespace
}  // namespace shoal::test
