// Bounds on what calls and peers may take: scratch, groups created by others only, tags.
#include "test/check.h"
#include "test/duel.h"

namespace shoal::test {
namespace {

TEST("calls that need scratch take it in turn, under the staging ceiling") {
  // The last call is so slow that most calls wait for longer than a stuck one may.
  for (const auto& [shares_memory, step_ns] :
       {std::pair{false, kMillisecond}, {true, kMillisecond}, {false, 20 * kMillisecond}}) {
    World::Options options;
    options.net.shares_memory = shares_memory;
    options.step_ns = step_ns;
    options.shares_buffers = 0;
    options.idles = 0;
    options.engine.staging_bytes = 1u << 20;
    World world(3, options);
    const size_t reserved = world.engine(0).staging().reserved();  // for early messages
    std::vector<TestCall*> calls;
    Job job;
    job.kind = Kind::kDirectAllReduce;
    job.n_elems = 32u << 10;  // 256 KiB of scratch, for what two peers send
    job.segment_bytes = 16u << 10;
    for (job.key = 0; job.key < 60; ++job.key)
      for (const int rank : {0, 1, 2}) calls.push_back(&world.post(rank, job));
    size_t most = 0;
    CHECK(world.run([&] {
      for (const int rank : {0, 1, 2}) most = std::max(most, world.engine(rank).scratch_bytes());
      return world.n_unfinished() == 0;
    }));
    for (size_t at = 0; at < calls.size(); ++at)
      CHECK(calls[at]->result == expected(calls[at]->job, static_cast<int>(at % 3), 3));
    CHECK(most > 0);
    CHECK(most <= options.engine.staging_bytes + (256u << 10));
    for (const int rank : {0, 1, 2}) {
      CHECK_EQ(world.engine(rank).scratch_bytes(), 0);
      CHECK_EQ(world.engine(rank).staging().reserved(), reserved);
      CHECK(world.engine(rank).staging().peak() <= options.engine.staging_bytes);
    }
  }
}

TEST("ranks that start calls in different orders do not deadlock on scratch") {
  World::Options options;
  options.engine.staging_bytes = 64u << 10;  // no call's scratch fits
  World world(2, options);
  Job job;
  job.kind = Kind::kDirectAllReduce;
  job.n_elems = 32u << 10;
  job.segment_bytes = 16u << 10;
  std::vector<TestCall*> calls;
  for (uint64_t n = 0; n < 8; ++n)
    for (const int rank : {0, 1}) {
      job.key = rank == 0 ? n : 7 - n;
      calls.push_back(&world.post(rank, job));
    }
  CHECK(world.run_all(60'000));  // simulated milliseconds
  for (const TestCall* call : calls) CHECK(call->ok());
}

TEST("messages about groups that this rank never made are kept within a bound") {
  {
    Duel duel;
    const size_t before = duel.engine.n_groups();
    for (uint64_t n = 0; n < 20'000; ++n) {
      Frame frame = duel.frame(FrameType::kDisagree);
      frame.header.group = 1000 + n;
      duel.ends[1]->send(frame);
      if (n % 1000 == 0) duel.ends[1]->flush(duel.sink), duel.settle();
    }
    duel.ends[1]->flush(duel.sink);
    duel.settle();
    CHECK_EQ(duel.engine.n_groups(), before);
    CHECK(duel.engine.state_of(1) == Engine::PeerState::kAlive);
  }
  Duel duel;
  for (uint64_t n = 0; n < 20'000; ++n) {
    Frame frame = duel.frame(FrameType::kAbort);
    frame.header.group = 1000 + n;
    duel.ends[1]->send(frame);
    if (n % 1000 == 0) duel.ends[1]->flush(duel.sink), duel.settle();
  }
  duel.check_ended("ended more than 4096 groups that this rank has never made");
  CHECK(duel.engine.n_groups() < 5000);
}

TEST("a group that was ended before it was made frees its place in the bound once it is made") {
  World::Options options;
  options.idles = 0;
  World world(2, options);
  for (uint64_t id = 100; id < 100 + 3 * 4096; ++id) {
    world.engine(0).abort_group(world.add_group(0, id, {0, 1}), {Fault::kClosed, 0, "over"}, true);
    world.run_steps(4);
    CHECK(world.add_group(1, id, {0, 1}).life.why().fault == Fault::kClosed);
  }
  CHECK(world.engine(1).state_of(0) == Engine::PeerState::kAlive);
}

TEST("closed groups are remembered for a limited time") {
  Duel duel;
  for (uint64_t id = 100; id < 100'100; ++id)
    duel.engine.drop_group(duel.engine.add_group(id, {0, 1}));
  CHECK(duel.engine.n_groups() < 70'000);
  // A late frame of a recently closed group is still recognised as late.
  Frame notice = duel.frame(FrameType::kPost);
  notice.header.group = 100'099;
  const size_t before = duel.engine.n_groups();
  duel.send(notice);
  CHECK_EQ(duel.engine.n_groups(), before);
}

TEST("late frames of calls that ended long ago are dropped, however many") {
  Duel duel;
  Group& group = *duel.group;
  Job job;
  job.kind = Kind::kShardedAllReduce;
  const auto plan = plan_of(job, 0, 3);
  constexpr uint64_t kCalls = 75'000;
  for (uint64_t key = 100; key < 100 + kCalls; ++key)  // empty: nothing is waited for
    CHECK(duel.engine.post(group, Posting{plan, key, {{nullptr}}, INT64_MAX})->finished);
  Frame notice = duel.frame(FrameType::kPost);
  for (uint64_t key = 100; key < 100 + kCalls - 5000; ++key) {
    notice.header.key = key;
    duel.ends[1]->send(notice);
    if (key % 1000 == 0) duel.ends[1]->flush(duel.sink), duel.settle();
  }
  duel.ends[1]->flush(duel.sink);
  duel.settle();
  CHECK(duel.engine.state_of(1) == Engine::PeerState::kAlive);
}

TEST("a group refuses a new tag beyond its limit, with a reason") {
  World::Options options;
  options.engine.most_tags = 10;
  World world(2, options);
  std::vector<float> data(4);
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  ProgramBuilder program(2);
  program.send(1, 0);
  Plan plan;
  plan.program = program.done();
  plan.by_pair = true;
  plan.layout[kData] = equal_layout(16, 1);
  const auto message = seal(std::move(plan), DType::kFloat32, FoldOp::kSum, 1, 64, "send");
  Engine& engine = world.engine(0);
  const auto send = [&](int64_t tag) {
    return engine.post(*world.groups[0], Message{message, true, 1, tag, bytes, World::kNever});
  };
  for (int64_t tag = 0; tag < 10; ++tag) CHECK(!send(tag)->error);
  CHECK(!send(3)->error);
  const auto refused = send(10);
  CHECK(refused->finished);
  CHECK(refused->error.fault == Fault::kMismatch);
  CHECK(has(refused->error.text, "10 pairs of a rank and a tag"));
  CHECK(!world.groups[0]->life.has_ended());
  world.run_steps(10);
}

TEST("a peer that requests replies and reads none loses its link before our memory runs out") {
  for (const FrameType type : {FrameType::kAsk, FrameType::kAbort, FrameType::kOffer}) {
    const bool is_offer = type == FrameType::kOffer;
    Duel duel(is_offer);
    duel.reads = false;
    duel.net.options.room = 1;
    duel.settle();
    if (is_offer) duel.engine.abort_group(*duel.group, {Fault::kClosed, 0, "enough"}, false);
    Frame frame = duel.frame(type);
    if (type == FrameType::kAbort) frame.header.group = 99;
    Bytes payload;
    if (is_offer) {
      frame.header.flags = kInSlot;
      frame.header.count = 1;
      payload.resize(sizeof(Place));
    }
    for (int n = 0; n < 100'000 && duel.engine.state_of(1) == Engine::PeerState::kAlive; ++n) {
      duel.engine.arrived(1, frame.header, payload);
      if (n % 1000 == 0) duel.engine.progress();
    }
    CHECK(duel.engine.state_of(1) == Engine::PeerState::kLost);
  }
}

}  // namespace
}  // namespace shoal::test
