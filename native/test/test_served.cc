// Served calls: peers begin them, whatever arrives in whichever order, and nothing else does.
#include "engine/segments/served_calls.h"
#include "test/check.h"
#include "test/cluster.h"
#include "test/faults.h"
#include "test/pool_world.h"

namespace shoal::test {
namespace {

void say_nothing_twice(World::Options& options) {
  options.engine.heartbeat_ns = 3600 * kSecond;
  options.engine.dead_ns = options.engine.suspect_ns = options.engine.heartbeat_ns;
}

// Calls with names, and calls with numbers.
uint64_t random_key(FakeRandom& random, uint64_t n) {
  return random.chance(0.5) ? n : kNamed | random.below(1u << 20) << 20 | n;
}

TEST("workers' calls are served, whenever the plan arrives and whatever happens to frames") {
  for (uint64_t seed = 0; seed < seeds(60); ++seed) {
    World::Options options = options_for(seed);
    say_nothing_twice(options);
    options.net.room = seed % 5 == 0 ? 4 : 0;
    options.net.n_paths = seed % 6 == 0 ? 2 : options.net.n_paths;
    if (options.net.n_paths > 0) options.net.shares_memory = false;
    FakeRandom random(seed);
    const int n_workers = 2 + static_cast<int>(seed % 3);
    const int n_servers = 1 + static_cast<int>(seed / 3 % 3);
    Pool pool(n_workers, n_servers, options);
    for (uint64_t n = 1; n <= 6; ++n) {
      PoolJob job = random_pool_job(random, n_workers, n_servers, random_key(random, n));
      if (options.net.shares_memory) job.codec = Codec::kIdentity;
      const bool is_known = random.chance(0.5);
      if (is_known) pool.serve(job);
      pool.post_all(job);
      pool.world.run_steps(static_cast<int>(random.below(30)));
      if (!is_known) pool.serve(job);
    }
    pool.check("seed " + std::to_string(seed));
  }
}

TEST("one plan serves any number of calls, and calls above the limit in flight wait") {
  World::Options options;
  options.idles = 0;
  options.net.max_inline = 64;
  Pool pool(2, 1, options);
  PoolJob job{2, 1};
  job.n_elems = 40;
  pool.serve(job);
  for (job.key = 1; job.key <= 3 * ServedCalls::kMostInFlight; ++job.key) {
    pool.calls.push_back({0, job, &pool.post(0, job)});
    if (job.key % 50 == 0) pool.world.step();
  }
  pool.world.run_steps(100);
  CHECK_EQ(pool.world.engine(2).n_in_flight(), ServedCalls::kMostInFlight);
  CHECK_EQ(pool.world.n_unfinished(), 3 * ServedCalls::kMostInFlight);
  for (job.key = 1; job.key <= 3 * ServedCalls::kMostInFlight; ++job.key)
    pool.calls.push_back({1, job, &pool.post(1, job)});
  pool.check("one worker behind");
}

TEST("calls that all workers have made begin when the plan arrives, as room allows") {
  World::Options options;
  options.idles = 0;
  options.net.max_inline = 64;
  say_nothing_twice(options);
  Pool pool(2, 1, options);
  PoolJob job{2, 1};
  job.n_elems = 40;
  for (job.key = 1; job.key <= 2 * ServedCalls::kMostInFlight + 1; ++job.key) {
    pool.post_all(job);
    pool.world.step();
  }
  pool.world.run_steps(20);
  CHECK_EQ(pool.world.engine(2).n_in_flight(), 0u);
  pool.serve(job);
  CHECK_EQ(pool.world.engine(2).n_in_flight(), ServedCalls::kMostInFlight);
  pool.check("plan last");
}

TEST("the least recently used plan makes way when a group has its maximum of plans") {
  Pool pool(2, 1, {});
  PoolJob job{2, 1};
  job.n_elems = 5;
  pool.serve(job);
  PoolJob other = job;
  for (uint64_t n = 0; n < ServedCalls::kMostPlans - 1; ++n) {
    other.n_elems = 10 + n;
    pool.serve(other);
  }
  pool.post_all(job);
  pool.check("used again");
  other.n_elems = 9;
  pool.serve(other);
  job.key = 2;  // the first plan is still known, since it was used after the second arrived
  pool.post_all(job);
  pool.check("kept");
  other.n_elems = 10;
  other.key = 3;
  pool.post_all(other);
  CHECK(!pool.world.run_all(300));
  pool.serve(other);
  pool.check("served again");
}

// Worker 0 has as many calls in flight as a server serves; all others wait.
struct FullPool : Pool {
  FullPool() : Pool(2, 1, options()) {
    PoolJob job{2, 1};
    job.n_elems = 40;
    serve(job);
    for (job.key = 1; job.key <= ServedCalls::kMostInFlight; ++job.key) post_one(job);
  }
  static World::Options options() {
    World::Options options;
    options.idles = 0;
    options.net.max_inline = 64;
    return options;
  }
  // By worker 0; the server learns of it.
  void post_one(const PoolJob& job) {
    calls.push_back({0, job, &post(0, job)});
    world.run_steps(2);
  }
};

TEST("a plan is kept while a call of it waits, whatever plans come after it") {
  FullPool pool;
  PoolJob waiting{2, 1, 1000};
  waiting.n_elems = 41;
  pool.serve(waiting);
  pool.post_one(waiting);
  pool.world.run_steps(100);
  CHECK_EQ(pool.world.engine(2).n_in_flight(), ServedCalls::kMostInFlight);
  PoolJob other{2, 1};
  for (other.n_elems = 100; other.n_elems < 100 + ServedCalls::kMostPlans; ++other.n_elems)
    pool.serve(other);
  for (const Pool::Posted& one : std::vector(pool.calls))
    pool.calls.push_back({1, one.job, &pool.post(1, one.job)});
  pool.check("both workers");
}

TEST("a group whose calls of too many kinds wait ends with an error that says so") {
  FullPool pool;
  PoolJob other{2, 1};
  other.segment_bytes = 16 << 10;
  for (uint64_t n = 0; n < ServedCalls::kMostPlans; ++n) {
    other.n_elems = 100 + n;
    other.key = 1000 + n;
    pool.serve(other);
    pool.post_one(other);
  }
  pool.world.run_steps(100);
  CHECK_EQ(pool.world.n_unfinished(), pool.calls.size());
  other.n_elems = 99;
  pool.serve(other);
  CHECK(pool.world.run_all());
  for (const Pool::Posted& one : pool.calls) {
    CHECK(one.call->error.fault == Fault::kResource);
    CHECK(has(one.call->error.text, "cannot serve " + other.descriptor()));
    CHECK(has(one.call->error.text, "calls of 1024 other kinds wait here"));
  }
}

TEST("a plan for another rank or group is refused with the reason") {
  World world(3, {});
  PoolJob job{2, 1};
  job.n_elems = 50;
  Group& group = *world.groups[2];
  const auto refusal = [&](const Group& in, const PoolJob& of, int rank) {
    return ServedCalls::refusal(in, *plan_of(of, rank));
  };
  CHECK_EQ(refusal(group, job, 2), "");
  CHECK(has(refusal(*world.groups[0], job, 2), "is one of 2 workers"));
  CHECK(has(refusal(group, job, 0), "may only receive, finish and send chunks of scratch"));
  PoolJob wider = job;
  wider.n_servers = 2;
  CHECK(has(refusal(group, wider, 2), "a plan for 4 ranks cannot be served in a group of 3"));
  Plan plan = *plan_of(job, 2);
  plan.n_workers = 0;
  CHECK(has(ServedCalls::refusal(group, plan), "0 workers in a group of 3"));
  plan.n_workers = 2;
  ProgramBuilder twice(3);
  twice.recv(0, 0, false, kScratch);
  twice.recv(1, 0, false, kScratch);
  plan.program = twice.done();
  CHECK(has(ServedCalls::refusal(group, plan), "store each chunk of scratch once"));
}

TEST("two served plans whose descriptors hash to the same value end the group and are named") {
  Pool pool(2, 1, {});
  PoolJob job{2, 1}, other{2, 1};
  job.n_elems = 50;
  other.n_elems = 51;
  pool.serve(job);
  Plan alike = *plan_of(other, 2);
  alike.descriptor_hash = plan_of(job, 2)->descriptor_hash;
  Group& group = *pool.world.groups[2];
  pool.world.engine(2).serve(group, std::make_shared<Plan>(alike), 0);
  CHECK(group.life.why().fault == Fault::kResource);
  CHECK(has(group.life.why().text, job.descriptor()));
  CHECK(has(group.life.why().text, other.descriptor()));
}

TEST("workers with different calls under one key get an error with both, and so does the server") {
  for (uint64_t seed = 0; seed < seeds(30); ++seed) {
    Pool pool(3, 2, options_for(seed));
    PoolJob job{3, 2};
    job.n_elems = seed % 3 == 0 ? 7 : 2000;
    PoolJob other = job;
    other.n_elems++;
    pool.serve(job);
    if (seed % 2 == 0) pool.serve(other);
    const int odd = static_cast<int>(seed % 3);
    std::vector<TestCall*> calls;
    for (const int rank : pool.world.shuffled(3))
      calls.push_back(&pool.post(rank, rank == odd ? other : job));
    CHECK(pool.world.run_all(3000));
    for (const TestCall* call : calls) {
      CHECK(call->error.fault == Fault::kMismatch);
      CHECK(has(call->error.text, job.descriptor()));
      CHECK(has(call->error.text, other.descriptor()));
    }
    pool.world.run_steps(50);
    for (int rank = 0; rank < 5; ++rank)
      CHECK(pool.world.groups[static_cast<size_t>(rank)]->life.why().fault == Fault::kMismatch);
  }
}

TEST("workers whose served calls have different subjects get an error that names both") {
  for (uint64_t seed = 0; seed < seeds(30); ++seed) {
    Pool pool(3, 2, options_for(seed));
    PoolJob job{3, 2};
    job.n_elems = seed % 3 == 0 ? 7 : 2000;
    pool.serve(job);
    const int odd = static_cast<int>(seed % 3);
    std::vector<TestCall*> calls;
    for (const int rank : pool.world.shuffled(3)) {
      job.subject = rank == odd ? 1u << 24 : 2u << 24;
      calls.push_back(&pool.post(rank, job));
    }
    CHECK(pool.world.run_all(3000));
    for (const TestCall* call : calls) {
      CHECK(call->error.fault == Fault::kMismatch);
      CHECK(has(call->error.text, "for averager 1, step 0, buffer 0"));
      CHECK(has(call->error.text, "for averager 2, step 0, buffer 0"));
      CHECK(has(call->error.text, World::name(odd)));
      CHECK(has(call->error.text, " did; every rank"));
    }
  }
}

TEST("a worker that dies in a served call ends the group, and servers keep nothing of it") {
  for (uint64_t seed = 0; seed < seeds(40); ++seed) {
    Pool pool(3, 2, options_for(seed));
    PoolJob job{3, 2};
    job.n_elems = 1000;
    pool.serve(job);
    const size_t reserved = pool.world.engine(3).staging().reserved();
    for (job.key = 1; job.key < 4; ++job.key) pool.post_all(job);
    const uint64_t frame = pool.world.net.n_sent() + seed * 7;
    pool.world.run([&] { return pool.world.net.n_sent() >= frame; });
    pool.world.kill(0);
    CHECK(pool.world.run_all());
    pool.world.run_steps(100);
    for (const auto& [rank, of, call] : pool.calls)
      CHECK(call->ok() || call->error.peer == 0 || call->error.fault == Fault::kClosed);
    for (const int rank : {3, 4}) {
      CHECK(pool.world.groups[static_cast<size_t>(rank)]->life.has_ended());
      CHECK_EQ(pool.world.engine(rank).n_in_flight(), 0u);
      CHECK_EQ(pool.world.engine(rank).scratch_bytes(), 0u);
      CHECK_EQ(pool.world.engine(rank).staging().reserved(), reserved);
    }
  }
}

// ---- over real links, with progress threads alone on the servers

void serve_in(Cluster& cluster, const PoolJob& job) {
  for (int rank = job.n_workers; rank < job.size(); ++rank) {
    Group& group = *cluster.groups[static_cast<size_t>(rank)];
    const auto plan = plan_of(job, rank);
    CHECK_EQ(ServedCalls::refusal(group, *plan), "");
    cluster.meshes[static_cast<size_t>(rank)]->serve(group, plan);
  }
}

void run_in(Cluster& cluster, const PoolJob& job) {
  in_threads(job.n_workers, [&](int rank) {
    const auto at = static_cast<size_t>(rank);
    Bytes memory = input_of(job, rank);
    const auto call = cluster.meshes[at]->post(
        *cluster.groups[at],
        Posting{plan_of(job, rank), job.key, {{memory.data()}}, now_ns() + kPatience});
    CHECK(eventually([&] { return cluster.meshes[at]->wait(*call, kPatience); }));
    CHECK_EQ(call->outcome().text, "");
    CHECK(memory == expected(job));
  });
}

TEST("servers that only sleep serve calls through sockets, rings and several channels") {
  struct Where {
    int per_host, n_channels;
  };
  for (const Where where : {Where{1, 1}, Where{1, 3}, Where{4, 1}, Where{2, 1}}) {
    Cluster cluster(4, where.per_host, 0, 1, 0, where.n_channels);
    for (uint64_t n = 1; n <= 20; ++n) {
      PoolJob job{2, 2, n % 2 == 0 ? n : kNamed | n};
      job.n_elems = n * n * 150;
      job.segment_bytes = 4096;
      job.n_lanes = n % 4 == 0 ? 1 : static_cast<uint32_t>(where.n_channels);
      job.seed = n;
      serve_in(cluster, job);
      run_in(cluster, job);
      if (n % 3 != 0) continue;
      // A caller of the server's own leaves its ring to the progress thread again.
      Job message;
      message.kind = Kind::kDirectAllReduce;
      message.key = 1000 + n;
      message.n_elems = 3;
      cluster.run_all(message);
      job.key = kNamed | (2000 + n);
      run_in(cluster, job);
    }
  }
}

}  // namespace
}  // namespace shoal::test
