// The state that a server's death leaves: each segment holds the whole result or the whole input,
// and no worker is done before all have everything.
#include "test/cluster.h"
#include "test/duel.h"
#include "test/pool_world.h"

namespace shoal::test {
namespace {

bool is_full(const PoolJob& job, const Landed& landed) {
  const ChunkLayout data = layout_of(job);
  for (const auto& [chunk, bits] : landed) {
    const uint64_t n_segments = (data.n_bytes[chunk] + job.segment_bytes - 1) / job.segment_bytes;
    for (uint64_t segment = 0; segment < n_segments; ++segment)
      if ((bits[segment / 8] >> segment % 8 & 1) == 0) return false;
  }
  return true;
}

// A fault in the memory that a failed call has left; empty if there is none.
std::string wrong_with(const PoolJob& job, int rank, const Landed& landed, const Bytes& left) {
  const ChunkLayout data = layout_of(job);
  const Bytes input = input_of(job, rank), result = expected(job);
  if (landed.size() != job.n_chunks()) return "chunks are missing";
  std::vector<bool> is_reported(job.n_chunks(), false);
  for (const auto& [chunk, bits] : landed) {
    if (is_reported[chunk]) return "a chunk is reported twice";
    is_reported[chunk] = true;
    const uint64_t n_segments = (data.n_bytes[chunk] + job.segment_bytes - 1) / job.segment_bytes;
    if (bits.size() != (n_segments + 7) / 8) return "a bitmap has a wrong length";
    for (uint64_t segment = 0; segment < n_segments; ++segment) {
      const bool is_here = (bits[segment / 8] >> segment % 8 & 1) != 0;
      const uint64_t from = data.offset[chunk] + segment * job.segment_bytes;
      const uint64_t end =
          std::min<uint64_t>(from + job.segment_bytes, data.offset[chunk] + data.n_bytes[chunk]);
      const Bytes& wanted = is_here ? result : input;
      if (!std::equal(wanted.begin() + static_cast<int64_t>(from),
                      wanted.begin() + static_cast<int64_t>(end),
                      left.begin() + static_cast<int64_t>(from)))
        return "segment " + std::to_string(segment) + " of chunk " + std::to_string(chunk) +
               (is_here ? " landed and is not the result" : " did not land and is not the input");
    }
    for (uint64_t bit = n_segments; bit < 8 * bits.size(); ++bit)
      if ((bits[bit / 8] >> bit % 8 & 1) != 0) return "a segment landed that does not exist";
  }
  return {};
}

// All calls of a pool are over, and some of its servers are gone.
void check_landed(const Pool& pool, const std::string& where) {
  std::map<uint64_t, std::pair<bool, bool>> by_key;  // some succeeded; all hold everything
  for (const auto& [rank, job, call] : pool.calls) {
    const Landed landed = landed_of(*call->handle);
    auto& [some_ok, all_full] = by_key.try_emplace(job.key, false, true).first->second;
    some_ok |= call->ok();
    all_full &= is_full(job, landed);
    const std::string wrong = call->ok() ? (call->result == expected(job) ? "" : "wrong result")
                                         : wrong_with(job, rank, landed, call->left);
    if (!wrong.empty())
      fail(__FILE__, __LINE__, where + ", rank " + std::to_string(rank) + ": " + wrong);
  }
  for (const auto& [key, what] : by_key)
    if (what.first && !what.second)
      fail(__FILE__, __LINE__, where + ": a call succeeded that some lack results of");
}

PoolJob small_job(uint64_t seed) {
  FakeRandom random(seed);
  PoolJob job{2 + static_cast<int>(seed % 3), 1 + static_cast<int>(seed / 3 % 2)};
  job.n_elems = 1 + random.below(400);
  if (seed % 8 == 1) {  // chunks on pages of their own, which a peer may write to
    job.n_elems = 1024 * job.n_chunks();
    job.segment_bytes = 2048;
  }
  job.op = random.chance(0.5) ? FoldOp::kSum : FoldOp::kAvg;
  job.seed = seed;
  job.is_uneven = seed % 8 != 1 && random.chance(0.4);
  return job;
}

// Two calls, and the rank that dies after this many frames. Returns the number of frames sent.
uint64_t die_at(uint64_t seed, uint64_t frame, const World::Options& options) {
  PoolJob job = small_job(seed);
  if (!options.net.shares_memory && seed % 4 == 0) {
    job.codec = codec_of(seed / 4);
    job.segment_bytes = whole_blocks(job.segment_bytes, job.codec);
  }
  Pool pool(job.n_workers, job.n_servers, options);
  pool.serve(job);
  for (job.key = 1; job.key <= 2; ++job.key) pool.post_all(job);
  pool.world.run(
      [&] { return pool.world.net.n_sent() >= frame || pool.world.n_unfinished() == 0; });
  const uint64_t n_sent = pool.world.net.n_sent();
  const int victim = job.n_workers + static_cast<int>(frame % static_cast<uint64_t>(job.n_servers));
  if (n_sent >= frame) pool.world.kill(victim);
  const std::string where = "seed " + std::to_string(seed) + ", frame " + std::to_string(frame);
  if (!pool.world.run_all()) fail(__FILE__, __LINE__, where + ": something waits for ever");
  pool.world.run_steps(30);
  for (const auto& [rank, of, call] : pool.calls)
    if (call->error && (call->error.fault != Fault::kPeerLost || call->error.peer != victim))
      fail(__FILE__, __LINE__, where + ": " + call->error.text);
  check_landed(pool, where);
  CHECK(pool.world.is_untouched());
  CHECK_EQ(pool.world.net.violation(), "");
  return n_sent;
}

TEST("a server that dies at any frame leaves each segment as result or input, in every call") {
  for (uint64_t seed = 0; seed < seeds(10); ++seed) {
    const World::Options options = options_for(seed);
    const uint64_t n_frames = die_at(seed, ~uint64_t{0}, options);
    for (uint64_t frame = 0; frame < n_frames; ++frame) die_at(seed, frame, options);
  }
}

TEST("the same holds over paths that break, with segments out of order") {
  for (uint64_t seed = 100; seed < 100 + seeds(6); ++seed) {
    World::Options options;
    options.net.seed = seed;
    options.net.n_paths = 1 + static_cast<int>(seed % 3);
    options.net.path_cuts = 0.02;
    options.net.delays = options.net.splits = 0.3;
    options.net.max_inline = 64;
    const uint64_t n_frames = die_at(seed, ~uint64_t{0}, options);
    FakeRandom random(seed);
    for (int n = 0; n < 30; ++n) die_at(seed, random.below(n_frames), options);
  }
}

TEST("a call that never began has committed no segment") {
  Pool pool(2, 1, {});
  pool.world.kill(2);
  pool.world.run_steps(20);
  PoolJob job{2, 1};
  job.n_elems = 100;
  pool.post_all(job);
  CHECK(pool.world.run_all());
  pool.post_all(job);  // the group has ended: this call is refused
  for (const auto& [rank, of, call] : pool.calls) {
    CHECK(call->error.fault == Fault::kPeerLost);
    for (const auto& [chunk, bits] : landed_of(*call->handle))
      CHECK(std::all_of(bits.begin(), bits.end(), [](uint8_t byte) { return byte == 0; }));
  }
}

TEST("a worker waits for workers that miss results, and names them at its deadline") {
  World::Options options;
  options.idles = 0;
  Pool pool(2, 1, options);
  PoolJob job{2, 1};
  job.n_elems = 100;
  pool.serve(job);
  pool.world.stop_reading(1, 2);
  TestCall& first = pool.post(0, job, pool.world.now + kSecond);
  TestCall& second = pool.post(1, job);
  CHECK(pool.world.run([&] { return first.finished; }, 3000));
  CHECK(first.error.fault == Fault::kTimedOut);
  CHECK(has(first.error.text, World::name(2) + " (in the same call, perhaps waiting for another"));
  CHECK(is_full(job, landed_of(*first.handle)));
  pool.world.read_again(1, 2);
  CHECK(pool.world.run_all());
  CHECK(!second.ok());
}

TEST("a server that leaves before all workers have committed ends the calls that wait for it") {
  World::Options options;
  options.idles = 0;
  Pool pool(2, 1, options);
  PoolJob job{2, 1};
  job.n_elems = 100;
  pool.serve(job);
  pool.world.stop_reading(1, 2);
  pool.post_all(job);
  pool.world.run_steps(50);
  CHECK_EQ(pool.world.n_unfinished(), 2u);
  pool.world.leave(2);
  pool.world.read_again(1, 2);
  CHECK(pool.world.run_all());
  check_landed(pool, "left");
}

// ---- liars

struct PoolDuel {
  explicit PoolDuel(bool is_worker) : rank(is_worker ? 0 : 2), net(3, FakeNet::Options()) {
    for (int peer = 0; peer < 3; ++peer) {
      if (peer == rank) continue;
      engine.set_link(peer, net.link(rank, peer), 0);
      ends[peer] = net.link(peer, rank);
    }
    group = &engine.add_group(7, {0, 1, 2});
    job.n_elems = 10;
    plan = plan_of(job, rank);
    memory = input_of(job, 0);
    if (is_worker)
      call = engine.post(*group, Posting{plan, job.key, {{memory.data()}}, INT64_MAX});
    else
      engine.serve(*group, plan, 0);
  }
  void commit(int from) {
    Frame frame;
    frame.header.type = FrameType::kCommit;
    frame.header.group = 7;
    frame.header.key = job.key;
    frame.header.descriptor = plan->descriptor_hash;
    ends[from]->send(frame);
    ends[from]->flush(sink);
    for (int n = 0; n < 10; ++n) {
      for (int peer = 0; peer < 3; ++peer)
        if (engine.link(peer) != nullptr) engine.link(peer)->pump(engine);
      engine.progress();
    }
  }

  const int rank;
  FakeNet net;
  Engine engine{rank, {World::name(0), World::name(1), World::name(2)}, {}};
  Silent sink;
  std::unique_ptr<Link> ends[3];
  Group* group = nullptr;
  PoolJob job{2, 1};
  std::shared_ptr<const Plan> plan;
  Bytes memory;
  std::shared_ptr<Call> call;
};

TEST("an impossible commit breaks the link") {
  PoolDuel worker(true);
  worker.commit(2);
  CHECK(worker.engine.state_of(2) == Engine::PeerState::kLost);
  CHECK(has(worker.call->error.text, "twice, or before it could"));
  PoolDuel from_worker(true);
  from_worker.commit(1);
  CHECK(from_worker.engine.state_of(1) == Engine::PeerState::kLost);
  PoolDuel server(false);
  server.commit(0);  // the first frame of the call that it receives
  CHECK(server.engine.state_of(0) == Engine::PeerState::kLost);
}

TEST("pages that a server's chunk shares with other memory are neither lent nor fenced") {
  PoolJob job{2, 1};
  job.n_elems = 100;
  Bytes memory(job.n_elems * sizeof(float));
  Call call;
  call.plan = plan_of(job, 0);
  call.memory[kData] = {memory.data()};
  const auto [begin, end] = call.extent(kData, 1);
  CHECK(begin == memory.data() + 200);
  CHECK(end == memory.data() + 400);
}

// ---- over several channels

TEST("the lanes of a failed call together report which segments have landed") {
  for (uint64_t turn = 0; turn < 10; ++turn) {
    Cluster cluster(3, 1, 0, 1, 0, 3);
    PoolJob job{2, 1};
    job.n_elems = 300'000;
    job.segment_bytes = 4096;
    job.n_lanes = 3;
    job.seed = turn;
    cluster.meshes[2]->serve(*cluster.groups[2], plan_of(job, 2));
    std::vector<Bytes> memory;
    std::vector<std::shared_ptr<Call>> calls;
    const auto post = [&] {
      memory = {input_of(job, 0), input_of(job, 1)};
      calls.clear();
      for (const size_t rank : {0u, 1u})
        calls.push_back(cluster.meshes[rank]->post(*cluster.groups[rank],
                                                   Posting{plan_of(job, static_cast<int>(rank)),
                                                           job.key,
                                                           {{memory[rank].data()}},
                                                           now_ns() + kPatience,
                                                           true}));
    };
    post();
    for (const auto& call : calls) {
      CHECK(eventually([&] { return call->is_over(); }));
      CHECK(is_full(job, landed_of(*call)));
    }
    job.key++;
    post();
    for (uint64_t n = 0; n < turn * 100; ++n) std::this_thread::yield();
    cluster.meshes[2]->close();
    for (const size_t rank : {0u, 1u}) {
      const Call& call = *calls[rank];
      CHECK(eventually([&] { return call.is_over(); }));
      const Landed landed = landed_of(call);
      if (call.outcome())
        CHECK_EQ(wrong_with(job, static_cast<int>(rank), landed, memory[rank]), "");
      else
        CHECK(memory[rank] == expected(job) && is_full(job, landed));
    }
    if (!calls[0]->outcome() || !calls[1]->outcome())
      CHECK(is_full(job, landed_of(*calls[0])) && is_full(job, landed_of(*calls[1])));
  }
}

}  // namespace
}  // namespace shoal::test
