// The protocol core without faults: whatever the order of frames and of posts, results equal a
// plain loop's, bounds hold and no call waits for ever.
#include "test/check.h"
#include "test/world.h"

namespace shoal::test {
namespace {

using Calls = std::vector<std::pair<int, TestCall*>>;

void check_results(const World& world, const Calls& calls, const std::string& where) {
  for (const auto& [rank, call] : calls) {
    if (call->ok() && call->result == expected(call->job, rank, world.size())) continue;
    fail(__FILE__, __LINE__,
         where + ", rank " + std::to_string(rank) + " of " + std::to_string(world.size()) + ", " +
             call->job.descriptor() + ": " +
             (call->finished ? (call->error ? call->error.text : "wrong result") : "not finished"));
  }
}

std::vector<Job> random_jobs(FakeRandom& random, int size, int n_jobs, uint64_t max_elems) {
  std::vector<Job> jobs;
  for (int n = 0; n < n_jobs; ++n)
    jobs.push_back(random_job(random, static_cast<uint64_t>(n) + 100, size, max_elems));
  return jobs;
}

// All jobs on all ranks, on each in a different order, with some turns in between.
Calls post_all(World& world, const std::vector<Job>& jobs) {
  Calls calls;
  for (const int rank : world.shuffled(world.size())) {
    for (const int at : world.shuffled(static_cast<int>(jobs.size()))) {
      calls.emplace_back(rank, &world.post(rank, jobs[static_cast<size_t>(at)]));
      if (world.random().chance(0.3)) world.step();
    }
  }
  return calls;
}

void try_jobs(int size, const World::Options& options, const std::string& where) {
  FakeRandom random(options.net.seed);
  World world(size, options);
  const Calls calls = post_all(world, random_jobs(random, size, 12, 400));
  CHECK(world.run_all());
  check_results(world, calls, where);
  CHECK(world.is_untouched());
  CHECK_EQ(world.net.violation(), "");
}

// ---- media

struct Medium {
  const char* name;
  void (*spoil)(FakeNet::Options&);
};

// One fault at a time, then all harmless ones together.
constexpr Medium kMedia[] = {
    {"plain", [](FakeNet::Options&) {}},
    {"delays", [](FakeNet::Options& net) { net.delays = 0.3; }},
    {"reorders", [](FakeNet::Options& net) { net.delays = net.reorders = 0.3; }},
    {"splits", [](FakeNet::Options& net) { net.splits = 0.5; }},
    {"reads late", [](FakeNet::Options& net) { net.reads_late = 0.5; }},
    {"reports late", [](FakeNet::Options& net) { net.reports_late = 0.5; }},
    {"has little room", [](FakeNet::Options& net) { net.room = 2; }},
    {"borrows all", [](FakeNet::Options& net) { net.copied = 0; }},
    {"everything",
     [](FakeNet::Options& net) {
       net.delays = net.reorders = net.splits = net.reads_late = net.reports_late = 0.2;
       net.refuses_share = 0.3;
       net.room = 4;
       net.copied = 32;
     }},
};

// Over streams of bytes, as TCP: frames are numbered and acknowledged.
constexpr Medium kPaths[] = {
    {"one path", [](FakeNet::Options& net) { net.n_paths = 1; }},
    {"one path in pieces",
     [](FakeNet::Options& net) {
       net.n_paths = 1;
       net.delays = net.splits = 0.3;
       net.copied = 0;
     }},
    {"two paths that are made at the first use",
     [](FakeNet::Options& net) {
       net.n_paths = 2;
       net.longest_remake = 20;
       net.begins_unlinked = true;
       net.delays = net.splits = 0.3;
     }},
    {"three paths that break, and what is on them with them",
     [](FakeNet::Options& net) {
       net.n_paths = 3;
       net.path_cuts = 0.03;
       net.delays = net.splits = 0.3;
       net.copied = 32;
     }},
};

void try_medium(const Medium& medium, bool shares_memory, uint64_t n_seeds, int n_hosts = 1) {
  constexpr int kSizes[] = {1, 2, 3, 4, 5, 6, 7, 8, 13};
  constexpr size_t kInlines[] = {0, 16, 128, 1024};
  for (uint64_t seed = 0; seed < seeds(n_seeds); ++seed) {
    World::Options options;
    options.net.seed = seed;
    options.net.shares_memory = shares_memory;
    options.net.n_hosts = n_hosts;
    options.net.max_inline = kInlines[seed % 4];
    options.slot_quota = 1 + static_cast<uint32_t>(seed / 4 % 3);
    medium.spoil(options.net);
    try_jobs(kSizes[seed % 9], options,
             std::string(medium.name) + ", seed " + std::to_string(seed));
  }
}

TEST("every algorithm gives the plain loop's bits, whatever the network does to its frames") {
  for (const Medium& medium : kMedia) try_medium(medium, false, 36);
}

TEST("every algorithm gives the plain loop's bits over paths that break") {
  for (const Medium& medium : kPaths) try_medium(medium, false, 36);
}

TEST("every algorithm gives the plain loop's bits through shared memory, in any order of arrival") {
  for (const Medium& medium : kMedia) try_medium(medium, true, 36);
}

TEST("every algorithm gives the plain loop's bits where only some ranks share memory") {
  for (const Medium& medium : kMedia) try_medium(medium, true, 24, 3);
}

TEST("a narrow codec shortens data between hosts, and none in shared memory") {
  Job job;
  job.kind = Kind::kShardedAllReduce;
  job.n_elems = 10'001;
  const auto n_data_bytes = [&](Codec codec, bool shares_memory) {
    World::Options options;
    options.net.shares_memory = shares_memory;
    options.net.max_inline = 64;
    World world(4, options);
    uint64_t n_bytes = 0;
    world.net.tamper = [&](int, Header& header, const std::vector<std::byte>&) {
      if (header.type == FrameType::kData) n_bytes += header.length;
    };
    job.codec = codec;
    Calls calls;
    for (int rank = 0; rank < 4; ++rank) calls.emplace_back(rank, &world.post(rank, job));
    CHECK(world.run_all());
    check_results(world, calls, "of 10,001");
    return n_bytes;
  };
  CHECK_EQ(n_data_bytes(Codec::kIdentity, false), 2u * 3 * 4 * 10'001);
  for (size_t seed = 0; seed < kCodecs; ++seed) {
    const Codec codec = codec_of(seed);
    const uint64_t n_wide = n_data_bytes(Codec::kIdentity, true);
    CHECK_EQ(n_data_bytes(codec, true), n_wide);
    const auto narrow = narrow_for(codec, DType::kFloat32, FoldOp::kSum);
    uint64_t n_bytes = 0;
    for (const uint64_t n_elems : lengths_of(job, 4)) n_bytes += narrow->bytes_of(*narrow, n_elems);
    CHECK_EQ(n_data_bytes(codec, false), 2 * 3 * n_bytes);
  }
  CHECK_EQ(n_data_bytes(Codec::kBfloat16, false), 2u * 3 * 2 * 10'001);
}

TEST("a message whose wire form is short goes at once, however long it is in memory") {
  const auto n_eager = [](Codec codec) {
    World::Options options;
    options.net.max_inline = 64;
    World world(2, options);
    int n_frames = 0;
    world.net.tamper = [&](int, Header& header, const std::vector<std::byte>&) {
      if (header.type == FrameType::kData && (header.flags & kEager) != 0) n_frames++;
    };
    Job job;
    job.kind = Kind::kShardedAllReduce;
    job.n_elems = 64;  // two chunks of 128 B, or 64 B
    job.codec = codec;
    Calls calls;
    for (int rank = 0; rank < 2; ++rank) calls.emplace_back(rank, &world.post(rank, job));
    CHECK(world.run_all());
    check_results(world, calls, "of 64");
    return n_frames;
  };
  CHECK_EQ(n_eager(Codec::kIdentity), 0);
  CHECK(n_eager(Codec::kBfloat16) > 0);
}

TEST("for a peer that does not read, only a few segments are encoded") {
  World::Options options;
  options.net.room = 1;
  options.net.copied = 0;
  options.net.max_inline = 64;
  options.engine.staging_bytes = 1 << 20;
  World world(3, options);
  const size_t reserved = world.engine(0).staging().reserved();
  Job job;
  job.kind = Kind::kShardedAllReduce;
  job.n_elems = 100'000;
  job.segment_bytes = 256;
  job.codec = Codec::kBfloat16;
  Calls calls;
  for (int rank = 0; rank < 3; ++rank) calls.emplace_back(rank, &world.post(rank, job));
  world.run_steps(20);
  world.stop(2);
  world.run_steps(200);
  // 8 payloads of 128 B and one for each peer, besides the data that waits for its fold.
  CHECK(world.engine(0).staging().used() <= (8 + 2 + 2 * 8) * 128);
  CHECK(world.n_unfinished() == 3);
  world.go_on(2);
  CHECK(world.run_all(200'000));
  check_results(world, calls, "of 100,000");
  CHECK_EQ(world.engine(0).staging().used(), 0u);
  CHECK_EQ(world.engine(0).staging().reserved(), reserved);
}

// ---- bounds

TEST("staging stays under its ceiling, however much is in flight") {
  for (uint64_t seed = 0; seed < seeds(20); ++seed) {
    World::Options options;
    options.net.seed = seed;
    options.net.delays = 0.3;
    options.net.max_inline = seed % 2 == 0 ? 64 : 512;
    options.engine.staging_bytes = 24 << 10;
    FakeRandom random(seed);
    World world(4, options);
    const size_t reserved = world.engine(0).staging().reserved();
    std::vector<Job> jobs = random_jobs(random, 4, 12, 4000);
    for (Job& job : jobs) job.segment_bytes = 256;
    const Calls calls = post_all(world, jobs);
    CHECK(world.run_all());
    check_results(world, calls, "seed " + std::to_string(seed));
    // The frame that arrives now is not counted: one per peer.
    for (int rank = 0; rank < 4; ++rank) {
      CHECK(world.engine(rank).staging().peak() <= options.engine.staging_bytes + 3 * 256);
      CHECK_EQ(world.engine(rank).staging().used(), 0u);
      CHECK_EQ(world.engine(rank).staging().reserved(), reserved);
    }
  }
}

TEST("a rank far ahead of another is held back and loses no data") {
  World::Options options;
  options.engine.staging_bytes = 16 << 10;  // 4 KiB of eager allowance: a dozen small messages
  World world(2, options);
  constexpr int kCalls = 500;
  Calls calls;
  for (int n = 0; n < kCalls; ++n) {
    Job job;
    job.kind = Kind::kDirectBroadcast;
    job.key = static_cast<uint64_t>(n);
    job.n_elems = 1 + static_cast<uint64_t>(n) % 40;
    calls.emplace_back(0, &world.post(0, job));
    if (n % 10 == 0) world.step();
  }
  world.run_steps(50);
  CHECK(world.n_unfinished() > kCalls / 2);
  for (int n = kCalls - 1; n >= 0; --n)
    calls.emplace_back(1, &world.post(1, calls[static_cast<size_t>(n)].second->job));
  CHECK(world.run_all());
  check_results(world, calls, "far ahead");
}

TEST("more calls than late frames are remembered for do no harm") {
  World::Options options;
  options.idles = 0;
  World world(2, options);
  constexpr int kCalls = 9000;  // the engine compares late frames of the last 4096 at least
  for (int n = 0; n < kCalls; ++n) {
    Job job;
    job.kind = n % 2 == 0 ? Kind::kDirectBroadcast : Kind::kDirectAllReduce;
    job.key = static_cast<uint64_t>(n);
    job.n_elems = 1;
    const TestCall& root = world.post(0, job);
    const TestCall& other = world.post(1, job);
    CHECK(world.run([&] { return root.finished && other.finished; }, 20));
  }
}

// ---- posting early and late

TEST("data for a call that is not posted yet is kept and used") {
  for (const bool shares_memory : {false, true}) {
    World::Options options;
    options.net.shares_memory = shares_memory;
    World world(3, options);
    Job job;
    job.kind = Kind::kDirectAllReduce;
    job.n_elems = 10;
    Calls calls = {{0, &world.post(0, job)}, {2, &world.post(2, job)}};
    world.run_steps(100);
    CHECK_EQ(world.n_unfinished(), 2u);
    calls.emplace_back(1, &world.post(1, job));
    world.engine(1).progress();
    CHECK(calls.back().second->finished);  // everything it needs arrived long ago
    CHECK(world.run_all(20));
    check_results(world, calls, "late post");
  }
}

TEST("a rank that posts late receives large data only after it posted") {
  for (const bool shares_memory : {false, true}) {
    World::Options options;
    options.net.shares_memory = shares_memory;
    World world(2, options);
    Job job;
    job.kind = Kind::kDirectBroadcast;
    job.n_elems = 5000;
    Calls calls = {{0, &world.post(0, job)}};
    world.run_steps(100);
    CHECK_EQ(world.engine(1).staging().peak(), 0u);
    CHECK(!calls[0].second->finished);
    calls.emplace_back(1, &world.post(1, job));
    CHECK(world.run_all(2000));
    check_results(world, calls, "late post");
  }
}

TEST("frames of a group that this rank has yet to make wait for it") {
  World::Options options;
  World world(3, options);
  Group& on_0 = world.add_group(0, 99, {0, 2});
  Job job;
  job.kind = Kind::kDirectAllReduce;
  job.n_elems = 10;
  const TestCall& first = world.post_in(0, on_0, job);
  world.run_steps(20);
  const TestCall& second = world.post_in(2, world.add_group(2, 99, {0, 2}), job);
  CHECK(world.run_all(20));
  CHECK(first.result == expected(job, 0, 2));
  CHECK(second.result == expected(job, 1, 2));
}

TEST("overlapping groups use the same keys side by side") {
  for (uint64_t seed = 0; seed < seeds(20); ++seed) {
    World::Options options;
    options.net.seed = seed;
    options.net.delays = options.net.reorders = 0.3;
    options.net.shares_memory = seed % 2 == 1;
    World world(5, options);
    const std::vector<std::vector<int>> members = {{0, 1, 2, 3, 4}, {4, 2, 0}, {1, 2}, {3}};
    FakeRandom random(seed);
    std::vector<std::pair<TestCall*, Bytes>> calls;
    for (size_t id = 0; id < members.size(); ++id) {
      const auto size = static_cast<int>(members[id].size());
      const Job job = random_job(random, 5, size, 300);
      for (int rank = 0; rank < size; ++rank) {
        const int mesh_rank = members[id][static_cast<size_t>(rank)];
        Group& group = world.add_group(mesh_rank, 50 + id, members[id]);
        TestCall& call = world.post_in(mesh_rank, group, job);
        calls.emplace_back(&call, expected(call.job, rank, size));
      }
    }
    CHECK(world.run_all());
    for (const auto& [call, result] : calls) CHECK(call->ok() && call->result == result);
  }
}

TEST("a second call with a key in flight is refused, and the first goes on") {
  World world(2, {});
  Job job;
  job.n_elems = 5000;
  const TestCall& first = world.post(0, job);
  const auto again = world.engine(0).post(*world.groups[0], Posting{plan_of(job, 0, 2), job.key});
  CHECK(again->finished);
  CHECK(again->error.fault == Fault::kMismatch);
  world.post(1, job);
  CHECK(world.run_all());
  CHECK(first.result == expected(job, 0, 2));
}

// ---- dataflow

// Only small buffers: the prover refuses this schedule, since each rank's receive waits for its own
// send, and large sends wait for the other's receive.
TEST("two ranks that swap small buffers in place never send what they received") {
  for (uint64_t seed = 0; seed < seeds(60); ++seed) {
    World::Options options;
    options.net.seed = seed;
    options.net.shares_memory = seed % 3 == 2;
    options.net.max_inline = 2048;
    options.net.copied = 0;
    options.net.room = 1;
    options.net.reads_late = options.net.delays = 0.5;
    World world(2, options);
    Job job;
    job.n_elems = 500;
    Plan plan;
    plan.layout[kData] = equal_layout(2000, 1);
    const Bytes mine[] = {input_of(job, 0, 2), input_of(job, 1, 2)};
    const TestCall* calls[2];
    for (const int rank : {0, 1}) {
      plan.program = swap_with(1 - rank, 2);
      calls[rank] =
          &world.post_plan(rank, *world.groups[static_cast<size_t>(rank)], job,
                           seal(plan, DType::kFloat32, FoldOp::kSum, 1, 64, "swap"), mine[rank]);
    }
    CHECK(world.run_all());
    CHECK(calls[0]->result == mine[1]);
    CHECK(calls[1]->result == mine[0]);
    CHECK_EQ(world.net.violation(), "");
  }
}

TEST("a point-to-point message meets its receive, whichever is first") {
  for (const int first : {0, 1}) {
    for (const uint64_t n_elems : {uint64_t{1}, uint64_t{5000}}) {
      World world(3, {});
      Job job;
      job.n_elems = n_elems;
      Plan plan;
      plan.layout[kData] = equal_layout(n_elems * 4, 1);
      const Bytes data = input_of(job, 0, 1);
      const TestCall* calls[2];
      for (const int rank : {first, 1 - first}) {
        plan.program = point_to_point(rank, 3, 0, 1);
        calls[rank] = &world.post_plan(rank, *world.groups[static_cast<size_t>(rank)], job,
                                       seal(plan, DType::kFloat32, FoldOp::kSum, 1, 256, "p2p"),
                                       rank == 0 ? data : Bytes(data.size()));
        world.run_steps(30);
      }
      CHECK(world.run_all());
      CHECK(calls[1]->result == data);
    }
  }
}

TEST("peers keep a shared buffer until they have read it, whichever way its segments went") {
  // Forwarded as it arrives: some segments are offered before the receiver grants a place for the
  // others, and some find no region to share. World overwrites finished memory at once.
  for (uint64_t seed = 0; seed < seeds(150); ++seed) {
    World::Options options;
    options.net.seed = seed;
    options.net.shares_memory = true;
    options.net.max_inline = 16;
    options.net.delays = options.idles = 0.5;
    options.net.refuses_share = 0.3;
    options.shares_buffers = 0.8;
    FakeRandom random(seed);
    const int size = 3 + static_cast<int>(seed % 3);
    World world(size, options);
    std::vector<Job> jobs = random_jobs(random, size, 4, 400);
    for (Job& job : jobs) {
      const bool chain = job.key % 2 == 0;
      const int root = chain ? static_cast<int>(random.below(static_cast<uint64_t>(size))) : 0;
      const auto& [collective, algorithm] = chain ? Kind::kChainBroadcast : Kind::kRingAllGather;
      job = job_of(Recipes::all().find(collective, algorithm, size, root, ""), job);
      job.n_elems = 2000 + random.below(4000);
      job.segment_bytes = 1024;
    }
    const Calls calls = post_all(world, jobs);
    CHECK(world.run_all());
    check_results(world, calls, "seed " + std::to_string(seed));
    CHECK(world.is_untouched());
  }
}

// ---- sleeping

TEST("a sleeper never waits for more frames than will arrive") {
  for (uint64_t seed = 0; seed < seeds(60); ++seed) {
    World::Options options;
    options.net.seed = seed;
    options.net.delays = 0.5;
    const int size = 2 + static_cast<int>(seed % 5);
    FakeRandom random(seed);
    World world(size, options);
    const Job job = random_job(random, 1, size, 200);
    for (int rank = 1; rank < size; ++rank) world.post(rank, job);
    const TestCall& call = world.post(0, job);
    std::vector<std::pair<uint64_t, uint32_t>> promises;  // frames so far, frames still to come
    while (!call.finished) {
      promises.emplace_back(world.net.n_delivered_to(0),
                            world.engine(0).frames_awaited(*call.handle));
      world.step();
    }
    for (const auto& [so_far, awaited] : promises)
      CHECK(awaited <= 1 || so_far + awaited <= world.net.n_delivered_to(0));
  }
}

}  // namespace
}  // namespace shoal::test
