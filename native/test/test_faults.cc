// How the protocol core fails: every rank hears why, nobody waits for ever, and memory is free the
// moment a call has failed (World frees it inside on_finished; the address sanitizer watches).
#include "test/check.h"
#include "test/world.h"

namespace shoal::test {
namespace {

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

Job large(Kind kind = Kind::kRingAllReduce, uint64_t n_elems = 3000) {
  Job job;
  job.kind = kind;
  job.n_elems = n_elems;
  return job;
}

// What did finish well is right, whatever happened to the rest.
void check_no_wrong_result(const std::vector<Call*>& calls, const World& world, uint64_t seed) {
  for (size_t at = 0; at < calls.size(); ++at) {
    const Call& call = *calls[at];
    const int rank = static_cast<int>(at) % world.size();
    if (call.ok() && call.result != expected(call.job, rank, world.size()))
      fail(__FILE__, __LINE__, "seed " + std::to_string(seed) + ": a wrong result and no error");
  }
}

World::Options options_for(uint64_t seed) {
  World::Options options;
  options.net.seed = seed;
  options.net.shares_memory = seed % 2 == 1;
  options.net.max_inline = seed / 2 % 2 == 0 ? 64 : 1024;
  options.net.copied = 32;
  options.net.delays = options.net.splits = options.net.reads_late = options.net.reports_late = 0.2;
  return options;
}

// ---- disagreement

void try_mismatch(int size, const std::vector<Job>& wanted, const World::Options& options) {
  World world(size, options);
  std::vector<Call*> calls;
  for (int rank = 0; rank < size; ++rank)
    calls.push_back(&world.post(rank, wanted[static_cast<size_t>(rank)]));
  CHECK(world.run_all(2000));
  for (const Call* call : calls) {
    CHECK(call->error.fault == Fault::kMismatch);
    int n_named = 0;
    for (int rank = 0; rank < size; ++rank) n_named += has(call->error.text, World::name(rank));
    CHECK_EQ(n_named, 2);
    CHECK(has(call->error.text, wanted.front().descriptor()));
    CHECK(has(call->error.text, wanted.back().descriptor()));
  }
}

TEST("calls that differ end with an error on every rank that names both sides") {
  for (uint64_t seed = 0; seed < seeds(40); ++seed) {
    const int size = 2 + static_cast<int>(seed % 4);
    const uint64_t n_elems = seed % 3 == 0 ? 5 : 3000;
    std::vector<Job> wanted(static_cast<size_t>(size), large(Kind::kShardedAllReduce, n_elems));
    wanted.back().n_elems++;
    try_mismatch(size, wanted, options_for(seed));
    wanted.back() = wanted.front();
    wanted.back().op = FoldOp::kMax;
    try_mismatch(size, wanted, options_for(seed));
    wanted.back() = wanted.front();
    wanted.back().kind = Kind::kDirectAllGather;
    try_mismatch(size, wanted, options_for(seed));
  }
}

TEST("two ranks that both wait for a small broadcast of the other find out within a second") {
  for (const bool shares_memory : {false, true}) {
    World::Options options;
    options.net.shares_memory = shares_memory;
    World world(2, options);
    Job job = large(Kind::kDirectBroadcast, 1);
    job.root = 1;
    const Call& on_0 = world.post(0, job);
    job.root = 0;
    const Call& on_1 = world.post(1, job);
    CHECK(world.run_all(1000));
    CHECK(on_0.error.fault == Fault::kMismatch);
    CHECK_EQ(on_0.error.text, on_1.error.text);
    CHECK(has(on_0.error.text, "from rank 0"));
    CHECK(has(on_0.error.text, "from rank 1"));
  }
}

TEST("a call that differs from one that has ended here already is found out") {
  World world(2, {});
  Job job = large(Kind::kDirectBroadcast, 1);
  const Call& root = world.post(0, job);
  CHECK(world.run_all(10));  // the root had only to send
  job.n_elems = 2;
  const Call& late = world.post(1, job);
  CHECK(world.run_all(100));
  CHECK(root.ok());
  CHECK(late.error.fault == Fault::kMismatch);
  CHECK(world.groups[0]->poison.fault == Fault::kMismatch);
}

TEST("a call that differs from one whose caller has left already fails, and does not wait for it") {
  for (const bool posts_first : {true, false}) {
    World world(3, {});
    Job job = large(Kind::kDirectBroadcast, 1);
    world.post(0, job);
    CHECK(world.run_all(10));
    job.n_elems = 2;
    world.net.options.delays = 1;
    if (posts_first) world.post(1, job);
    world.leave(0);
    world.run_steps(20);
    const Call& late = world.post(posts_first ? 2 : 1, job);
    CHECK(world.run_all(100));
    CHECK(late.error.fault == Fault::kMismatch || posts_first);
    CHECK(late.error.fault == Fault::kMismatch || late.error.fault == Fault::kPeerLost);
    CHECK_EQ(late.error.peer, 0);
  }
}

TEST("a rank that posts after the others disagreed fails at once, with their words") {
  World world(3, {});
  const Call& on_0 = world.post(0, large());
  world.post(1, large(Kind::kRingAllReduce, 2000));
  CHECK(world.run_all(200));
  world.run_steps(20);
  const Call& on_2 = world.post(2, large());
  CHECK(on_2.finished);
  CHECK_EQ(on_2.error.text, on_0.error.text);
}

TEST("what a peer calls a call is printed without its control characters") {
  World world(2, {});
  Job job = large(Kind::kDirectAllReduce, 4);
  Plan plan = *plan_of(job, 1, 2);
  const auto odd = seal(plan, job.dtype, job.op, 1, 64, "all_\x1b[31mreduce \xff\xfe");
  const Call& call = world.post(0, job);
  world.post_plan(1, *world.groups[1], job, odd, input_of(job, 1, 2));
  CHECK(world.run_all(200));
  CHECK(has(call.error.text, "all_?[31mreduce ??"));
}

// ---- death

TEST("when a rank dies, every survivor's calls fail and name it") {
  for (uint64_t seed = 0; seed < seeds(120); ++seed) {
    const int size = 2 + static_cast<int>(seed % 5);
    World world(size, options_for(seed));
    FakeRandom random(seed);
    const int victim = static_cast<int>(random.below(static_cast<uint64_t>(size)));
    std::vector<Call*> calls;
    for (uint64_t key = 0; key < 6; ++key) {
      Job job = random_job(random, key, size, 3000);
      // One that cannot end without the victim, on any rank: a ring, where most are no neighbours.
      if (key == 0) job = large();
      for (int rank = 0; rank < size; ++rank) calls.push_back(&world.post(rank, job));
    }
    world.run_steps(static_cast<int>(random.below(25)));
    world.kill(victim);
    CHECK(world.run_all(500));
    check_no_wrong_result(calls, world, seed);
    for (size_t at = 0; at < calls.size(); ++at) {
      const Call& call = *calls[at];
      if (static_cast<int>(at) % size == victim || call.ok()) continue;
      CHECK(call.error.fault == Fault::kPeerLost);
      CHECK_EQ(call.error.peer, victim);
      CHECK(has(call.error.text, "closed the connection"));
      CHECK(has(call.error.doing, call.job.descriptor()));
    }
    world.run_steps(20);
    for (int rank = 0; rank < size; ++rank) {
      if (rank == victim) continue;
      const Call& later = world.post(rank, large(Kind::kDirectAllReduce, 1));
      CHECK(later.finished);
      CHECK_EQ(later.error.peer, victim);
    }
    world.run_steps(50);
    CHECK(world.is_untouched());
    CHECK_EQ(world.net.violation(), "");
  }
}

TEST("no survivor takes for a result what another wrote to its memory after its call had failed") {
  for (uint64_t seed = 0; seed < seeds(60); ++seed) {
    World::Options options;
    options.net.seed = seed;
    options.net.shares_memory = true;
    options.net.delays = options.idles = 0.4;
    options.net.longest_delay = 40;  // bad news travels slowly
    options.shares_buffers = 0.9;
    const int size = 3 + static_cast<int>(seed % 3);
    World world(size, options);
    FakeRandom random(seed);
    std::vector<Call*> calls;
    for (uint64_t key = 0; key < 5; ++key) {
      Job job = random_job(random, key, size, 1000);
      job.n_elems = 1000 + random.below(5000);
      job.segment_bytes = 1024;
      for (int rank = 0; rank < size; ++rank) calls.push_back(&world.post(rank, job));
    }
    world.run_steps(20 + static_cast<int>(random.below(150)));
    world.engine(0).abort_group(*world.groups[0], {Fault::kClosed, 0, "enough"}, true);
    CHECK(world.run_all(500));
    world.run_steps(50);
    check_no_wrong_result(calls, world, seed);
    CHECK(world.is_untouched());
  }
}

TEST("a new group with a rank that is gone fails at once, one without it works") {
  World world(3, {});
  world.kill(1);
  world.run_steps(20);
  const Call& with = world.post_in(0, world.add_group(0, 20, {0, 1}), large());
  CHECK(with.finished);
  CHECK_EQ(with.error.peer, 1);
  const Job job = large();
  const Call& on_0 = world.post_in(0, world.add_group(0, 21, {0, 2}), job);
  const Call& on_2 = world.post_in(2, world.add_group(2, 21, {0, 2}), job);
  CHECK(world.run_all(500));
  CHECK(on_0.result == expected(job, 0, 2));
  CHECK(on_2.result == expected(job, 1, 2));
}

TEST("a cut between two ranks ends the group for everyone") {
  for (uint64_t seed = 0; seed < seeds(30); ++seed) {
    World world(4, options_for(seed));
    std::vector<Call*> calls;
    for (int rank = 0; rank < 4; ++rank) calls.push_back(&world.post(rank, large()));
    world.run_steps(static_cast<int>(seed % 10));
    world.net.cut(1, 2);
    CHECK(world.run_all(500));
    for (const Call* call : calls) {
      CHECK(call->error.fault == Fault::kPeerLost);
      CHECK(call->error.peer == 1 || call->error.peer == 2);
      CHECK(has(call->error.text, "closed the connection"));
    }
  }
}

TEST("two ranks that have lost each other are still there for everyone else") {
  for (uint64_t seed = 0; seed < seeds(30); ++seed) {
    World world(4, options_for(seed));
    world.post(0, large());
    world.run_steps(static_cast<int>(seed % 10));
    world.net.cut(1, 2);
    // Groups that hold one of the two, made before and after; and one that holds both.
    std::vector<Call*> calls;
    const std::vector<std::vector<int>> members = {{0, 1, 3}, {0, 2, 3}};
    for (const int when : {0, 1}) {
      for (size_t which = 0; which < members.size(); ++which)
        for (const int rank : members[which])
          calls.push_back(&world.post_in(
              rank,
              world.add_group(rank, 60 + 2 * static_cast<uint64_t>(when) + which, members[which]),
              large()));
      world.run_steps(200);
    }
    CHECK(world.run_all());
    for (size_t at = 0; at < calls.size(); ++at)
      CHECK(calls[at]->result == expected(calls[at]->job, static_cast<int>(at % 3), 3));
    for (const int rank : {0, 1, 2, 3}) {
      const Call& call = world.post_in(rank, world.add_group(rank, 70, {0, 1, 2, 3}), large());
      CHECK(call.finished);
      CHECK(call.error.fault == Fault::kPeerLost);
    }
  }
}

TEST("frames that are lost, cut or corrupt never make a wrong result or a hang") {
  int n_corrupt_texts = 0;
  for (uint64_t seed = 0; seed < seeds(150); ++seed) {
    const int size = 2 + static_cast<int>(seed % 4);
    World::Options options = options_for(seed);
    options.net.corrupts = seed % 3 == 0 ? 0 : 0.005;
    options.net.cuts = seed % 3 == 1 ? 0 : 0.005;
    World world(size, options);
    FakeRandom random(seed);
    std::vector<Call*> calls;
    for (uint64_t key = 0; key < 6; ++key) {
      const Job job = random_job(random, key, size, 1000);
      for (int rank = 0; rank < size; ++rank) calls.push_back(&world.post(rank, job));
    }
    CHECK(world.run_all(2000));
    check_no_wrong_result(calls, world, seed);
    for (const Call* call : calls) {
      if (call->ok()) continue;
      CHECK(call->error.fault == Fault::kPeerLost);
      CHECK(options.net.cuts > 0 || has(call->error.text, "corrupt") ||
            has(call->error.text, "closed the connection"));
      n_corrupt_texts += has(call->error.text, "corrupt");
    }
    world.run_steps(30);
    CHECK(world.is_untouched());
    CHECK_EQ(world.net.violation(), "");
  }
  CHECK(n_corrupt_texts > 20);
}

// ---- abort

TEST("an abort reaches every rank and carries its words") {
  for (uint64_t seed = 0; seed < seeds(20); ++seed) {
    World world(5, options_for(seed));
    std::vector<Call*> calls;
    for (int rank = 0; rank < 5; ++rank) calls.push_back(&world.post(rank, large()));
    world.run_steps(static_cast<int>(seed % 8));
    world.engine(3).abort_group(*world.groups[3], {Fault::kClosed, 3, "the operator said stop"},
                                true);
    CHECK(world.run_all(200));
    for (const Call* call : calls) {
      CHECK(call->error.fault == Fault::kClosed);
      CHECK_EQ(call->error.peer, 3);
      CHECK_EQ(call->error.text, "the operator said stop");
      CHECK(has(call->error.doing, "all_reduce by ring"));
    }
    CHECK(world.is_untouched());
    CHECK_EQ(world.net.violation(), "");
  }
}

TEST("an abort does not wait for calls of other groups, however busy those are") {
  World::Options options;
  options.idles = 0;
  World world(2, options);
  Group* other[2];
  for (const int rank : {0, 1}) other[rank] = &world.add_group(rank, 60, {0, 1});
  for (uint64_t key = 0; key < 40; ++key)
    for (const int rank : {0, 1}) {
      Job job = large(Kind::kRingAllReduce, 40'000);
      job.key = key;
      world.post_in(rank, *other[rank], job);
    }
  const Call& call = world.post(1, large());
  world.run_steps(2);
  world.engine(0).abort_group(*world.groups[0], {Fault::kClosed, 0, "stop"}, true);
  CHECK(world.run([&] { return call.finished; }, 30));
  CHECK(world.n_unfinished() > 40);  // they were busy all the while
}

TEST("an abort of a group that this rank has yet to make fails its calls, not its wait") {
  World world(2, {});
  Group& group = world.add_group(0, 99, {0, 1});
  world.engine(0).abort_group(group, {Fault::kClosed, 0, "gone before it began"}, true);
  world.run_steps(10);
  const Call& call = world.post_in(1, world.add_group(1, 99, {0, 1}), large());
  CHECK(call.finished);
  CHECK_EQ(call.error.text, "gone before it began");
}

TEST("an abort by a rank outside the group is the outsider's fault, not the group's") {
  World world(3, {});
  Group& group = world.add_group(0, 99, {0, 1});
  world.add_group(1, 99, {0, 1});
  // Rank 2 believes to be in it.
  Group& alien = world.add_group(2, 99, {0, 1, 2});
  world.engine(2).abort_group(alien, {Fault::kClosed, 2, "mine"}, true);
  world.run_steps(20);
  CHECK(!group.poison);
  CHECK(world.engine(0).state_of(2) == Engine::PeerState::kLost);
  CHECK(world.engine(0).state_of(1) == Engine::PeerState::kAlive);
}

TEST("after an abort the links serve other groups as before: nothing of theirs was used up") {
  for (uint64_t seed = 0; seed < seeds(20); ++seed) {
    World::Options options = options_for(seed);
    options.engine.staging_bytes = 24 << 10;  // a small eager allowance
    options.slot_quota = 2;
    World world(3, options);
    for (uint64_t id = 100; id < 120; ++id) {
      std::vector<Group*> groups;
      for (int rank = 0; rank < 3; ++rank) groups.push_back(&world.add_group(rank, id, {0, 1, 2}));
      for (uint64_t key = 0; key < 3; ++key) {
        Job job =
            large(key == 0 ? Kind::kDirectAllReduce : Kind::kShardedAllReduce, key == 0 ? 10 : 500);
        job.key = key;
        // The last ones are posted by two of three ranks only.
        for (int rank = key == 2 ? 1 : 0; rank < 3; ++rank)
          world.post_in(rank, *groups[static_cast<size_t>(rank)], job);
      }
      world.run_steps(static_cast<int>(seed % 10));
      world.engine(1).abort_group(*groups[1], {Fault::kClosed, 1, "enough"}, true);
      CHECK(world.run_all(200));
      if (id % 2 == 0)
        for (int rank = 0; rank < 3; ++rank)
          world.engine(rank).drop_group(*groups[static_cast<size_t>(rank)]);
    }
    std::vector<Call*> calls;
    for (uint64_t key = 0; key < 20; ++key) {
      Job job = large(key % 2 == 0 ? Kind::kDirectAllReduce : Kind::kShardedAllReduce,
                      key % 2 == 0 ? 10 : 500);
      job.key = key;
      for (int rank = 0; rank < 3; ++rank) calls.push_back(&world.post(rank, job));
    }
    CHECK(world.run_all(2000));
    for (size_t at = 0; at < calls.size(); ++at)
      CHECK(calls[at]->result == expected(calls[at]->job, static_cast<int>(at) % 3, 3));
    for (int rank = 0; rank < 3; ++rank) CHECK_EQ(world.engine(rank).staging().used(), 0u);
  }
}

TEST("small data of calls that failed is paid back, so that later ones need not ask") {
  World::Options options;
  options.engine.staging_bytes = 16 << 10;  // a handful of small messages to each peer
  World world(3, options);
  for (uint64_t id = 100; id < 200; ++id) {
    std::vector<Group*> groups;
    for (int rank = 0; rank < 3; ++rank) groups.push_back(&world.add_group(rank, id, {0, 1, 2}));
    const Job job = large(Kind::kDirectAllReduce, 10);
    // What rank 2 sent is folded after what rank 0 never sends; or it was never asked for; or it
    // comes when the group has ended.
    world.post_in(2, *groups[2], job);
    if (id % 3 == 0) world.post_in(1, *groups[1], job);
    if (id % 3 != 2) world.run_steps(10);
    world.engine(1).abort_group(*groups[1], {Fault::kClosed, 1, "enough"}, true);
    if (id % 6 >= 3) world.engine(1).drop_group(*groups[1]);
    CHECK(world.run_all(100));
    world.run_steps(10);
  }
  Job job = large(Kind::kDirectBroadcast, 10);
  job.root = 2;
  const Call& root = world.post(2, job);
  CHECK(world.run([&] { return root.finished; }, 10));  // nobody else has posted it
}

TEST("a group dropped with a call in flight fails it, and late frames of it are harmless") {
  World world(2, {});
  Group& on_0 = world.add_group(0, 50, {0, 1});
  Group& on_1 = world.add_group(1, 50, {0, 1});
  const Call& call = world.post_in(0, on_0, large());
  world.run_steps(2);
  world.engine(0).drop_group(on_0);
  CHECK(call.error.fault == Fault::kClosed);
  world.post_in(1, on_1, large(), world.now + kSecond);
  const Job job = large(Kind::kDirectAllReduce, 100);
  const Call& good_0 = world.post(0, job);
  const Call& good_1 = world.post(1, job);
  CHECK(world.run_all(3000));
  CHECK(good_0.result == expected(job, 0, 2));
  CHECK(good_1.result == expected(job, 1, 2));
}

// ---- time

TEST("a deadline ends the call on every rank and names whom it waited for") {
  for (const Kind kind : {Kind::kDirectAllReduce, Kind::kShardedAllReduce, Kind::kRingAllReduce}) {
    World world(4, {});
    std::vector<Call*> calls;
    for (const int rank : {0, 1, 3})  // rank 2 never comes
      calls.push_back(&world.post(rank, large(kind), world.now + 3 * kSecond));
    CHECK(world.run_all(3300));
    for (const Call* call : calls) {
      CHECK(call->error.fault == Fault::kTimedOut);
      CHECK(has(call->error.text, "reached the deadline of " + call->job.descriptor()));
      CHECK(call->finished_ns >= 4 * kSecond);
    }
    const std::string& text = calls[0]->error.text;
    const std::string blamed = text.substr(text.find("waiting for"));
    // In a ring a rank may only see that its neighbours, who wait themselves, send nothing.
    if (kind != Kind::kRingAllReduce) CHECK_EQ(blamed, "waiting for " + World::name(2));
    CHECK(blamed == "waiting for " + World::name(2) || has(blamed, "(in the same call, perhaps"));
  }
}

TEST("a deadline names eight ranks and counts the rest") {
  World world(13, {});
  const Call& call = world.post(0, large(Kind::kShardedAllReduce), world.now + kSecond);
  CHECK(world.run_all(1200));
  CHECK(has(call.error.text, World::name(8) + " and 4 more"));
  CHECK(!has(call.error.text, World::name(9)));
}

TEST("a stall of three seconds is harmless, one of more than five is a death") {
  for (const int stall_ms : {3000, 6000}) {
    World world(3, {});
    world.run_steps(500);
    std::vector<Call*> calls;
    for (int rank = 0; rank < 3; ++rank) calls.push_back(&world.post(rank, large()));
    world.stop(1);
    world.run_steps(stall_ms);
    CHECK_EQ(calls[0]->finished, stall_ms > 5000);
    world.go_on(1);
    CHECK(world.run_all(500));
    for (int rank = 0; rank < 3; ++rank) {
      const Call& call = *calls[static_cast<size_t>(rank)];
      if (stall_ms == 3000) {
        CHECK(call.result == expected(call.job, rank, 3));
      } else if (rank != 1) {
        CHECK_EQ(call.error.peer, 1);
        CHECK(has(call.error.text, "was silent for 5."));
        CHECK(call.finished_ns < 1500 * kMillisecond + 6 * kSecond);
      }
    }
  }
}

TEST("a rank that was given up fails its own calls and takes nobody with it") {
  World world(4, {});
  const Call& mine = world.post(1, large());
  world.stop(1);
  world.run_steps(6000);
  // The others have parted with it and work on without it.
  std::vector<Call*> calls;
  const std::vector<int> rest = {0, 2, 3};
  for (const int rank : rest)
    calls.push_back(&world.post_in(rank, world.add_group(rank, 60, rest), large()));
  world.go_on(1);
  CHECK(world.run_all(1000));
  CHECK(mine.error.fault == Fault::kPeerLost);
  CHECK(has(mine.error.text, "gave this rank up") || has(mine.error.text, "closed the connection"));
  for (size_t at = 0; at < 3; ++at)
    CHECK(calls[at]->result == expected(calls[at]->job, static_cast<int>(at), 3));
}

TEST("a rank that was given up by one hears so, and from nobody else that the others are gone") {
  World world(3, {});
  world.engine(0).peer_lost(1, "is gone, rank 0 says");
  world.engine(0).progress();
  // Rank 1 learns of it before rank 2 does, and rank 2 hears rank 1 first.
  for (const auto& [rank, peer] : {std::pair{1, 0}, {2, 1}, {2, 0}}) {
    if (world.engine(rank).link(peer) == nullptr) continue;
    world.engine(rank).link(peer)->pump(world.engine(rank));
    world.engine(rank).progress();
  }
  world.run_steps(10);
  CHECK(world.engine(1).state_of(0) == Engine::PeerState::kLost);
  CHECK(world.engine(2).state_of(1) == Engine::PeerState::kAlive);
  CHECK(world.engine(2).state_of(0) == Engine::PeerState::kAlive);
  CHECK(has(world.groups[1]->poison.text, "gave this rank up: this rank is gone, rank 0 says"));
  for (const Group* group : world.groups) CHECK(group->poison.fault == Fault::kPeerLost);
}

// Rank 2 is stopped with a segment of rank 0's in a slot that it has not read, and given up; the
// others work on until that slot holds other data. Then it goes on. `told`: it can read that it was
// given up; otherwise it finds the end of its links only, as where a ring was full.
Call& woken_zombie(World& world, bool told) {
  if (!told)
    world.net.tamper = [](int, Header& header, Bytes& words) {
      if (header.type != FrameType::kLost) return;
      header.type = FrameType::kHeartbeat;
      words.clear();
      header.length = 0;
    };
  Job job = large(Kind::kDirectBroadcast, 64);
  job.segment_bytes = 256;
  Call& mine = world.post(2, job);
  world.run_steps(20);
  world.stop(2);
  world.post(0, job);
  world.post(1, job);
  world.run([&] { return world.engine(0).link(2) == nullptr; });
  world.run([&] { return world.engine(1).link(2) == nullptr; });
  Group* rest[] = {&world.add_group(0, 60, {0, 1}), &world.add_group(1, 60, {0, 1})};
  for (uint64_t key = 100; key < 110; ++key) {
    job.key = job.seed = key;
    for (const int rank : {0, 1}) world.post_in(rank, *rest[rank], job);
    world.run_steps(20);
  }
  world.go_on(2);
  return mine;
}

TEST("a rank that was given up while stopped never takes what now lies in a slot for its message") {
  for (uint64_t seed = 0; seed < seeds(20); ++seed) {
    World::Options options;
    options.net.seed = seed;
    options.net.shares_memory = true;
    options.net.max_inline = 64;
    options.shares_buffers = 0;
    World world(3, options);
    const bool told = seed % 2 == 0;
    const Call& mine = woken_zombie(world, told);
    CHECK(world.run_all(200));
    CHECK(!mine.ok());
    CHECK(mine.error.fault == Fault::kPeerLost);
    if (told) CHECK(has(mine.error.text, "gave this rank up"));
  }
}

TEST("a rank that was stopped does not blame the others for its own absence") {
  World world(2, {});
  world.run_steps(1000);
  // Everything stands still, as when a laptop sleeps.
  world.stop(0);
  world.stop(1);
  world.run_steps(60'000);
  world.go_on(0);
  world.go_on(1);
  const Call& on_0 = world.post(0, large());
  const Call& on_1 = world.post(1, large());
  CHECK(world.run_all(500));
  CHECK(on_0.ok());
  CHECK(on_1.ok());
}

TEST("a quiet connection stays alive by heartbeats alone") {
  World world(3, {});
  world.run_steps(20'000);
  for (int rank = 0; rank < 3; ++rank)
    for (int peer = 0; peer < 3; ++peer)
      CHECK(rank == peer || world.engine(rank).state_of(peer) == Engine::PeerState::kAlive);
}

// ---- leaving

World::Options calm(uint64_t seed) {
  World::Options options;
  options.net.seed = seed;
  options.net.shares_memory = seed % 2 == 1;
  options.net.delays = options.net.splits = 0.3;
  return options;
}

TEST("a rank may leave as soon as its own calls are done: the others still finish theirs") {
  for (uint64_t seed = 0; seed < seeds(60); ++seed) {
    const int size = 2 + static_cast<int>(seed % 5);
    World world(size, calm(seed));
    FakeRandom random(seed);
    std::vector<std::vector<Call*>> calls(static_cast<size_t>(size));
    for (uint64_t key = 0; key < 4; ++key) {
      const Job job = random_job(random, key, size, 500);
      for (int rank = 0; rank < size; ++rank)
        calls[static_cast<size_t>(rank)].push_back(&world.post(rank, job));
    }
    std::vector<bool> gone(static_cast<size_t>(size), false);
    CHECK(world.run([&] {
      for (size_t rank = 0; rank < gone.size(); ++rank) {
        const bool done = std::all_of(calls[rank].begin(), calls[rank].end(),
                                      [](const Call* call) { return call->finished; });
        if (gone[rank] || !done) continue;
        world.leave(static_cast<int>(rank));
        gone[rank] = true;
      }
      return world.n_unfinished() == 0;
    }));
    for (int rank = 0; rank < size; ++rank)
      for (const Call* call : calls[static_cast<size_t>(rank)]) {
        if (call->ok() && call->result == expected(call->job, rank, size)) continue;
        fail(__FILE__, __LINE__,
             "seed " + std::to_string(seed) + ", rank " + std::to_string(rank) + ", " +
                 call->job.descriptor() + ": " + call->error.text);
      }
  }
}

TEST("a small broadcast is received even when its root has left before it was asked for") {
  World world(2, {});
  const Job job = large(Kind::kDirectBroadcast, 10);
  CHECK(world.post(0, job).handle != nullptr);
  CHECK(world.run_all(10));
  world.leave(0);
  world.run_steps(20);
  const Call& late = world.post(1, job);
  CHECK(world.run_all(10));
  CHECK(late.result == expected(job, 1, 2));
}

TEST("a group that is made after a member has left serves the others, and what that one had sent") {
  World world(3, {});
  const Job job = large(Kind::kDirectBroadcast, 10);  // from rank 0, eagerly
  world.post_in(0, world.add_group(0, 60, {0, 1}), job);
  CHECK(world.run_all(20));
  world.leave(0);
  world.run_steps(20);
  const Call& late = world.post_in(1, world.add_group(1, 60, {0, 1}), job);
  CHECK(world.run_all(20));
  CHECK(late.result == expected(job, 1, 2));
  // Of three: the two that are there exchange a message.
  Job between = job;
  between.root = 1;
  std::vector<Call*> calls;
  ProgramBuilder send, recv;
  send.send(2, 0);
  recv.recv(1, 0);
  for (const int rank : {1, 2}) {
    Plan plan;
    plan.program = (rank == 1 ? send : recv).done(3);
    plan.layout[kData] = equal_layout(40, 1);
    const auto sealed = seal(std::move(plan), DType::kFloat32, FoldOp::kSum, 1, 64, "a message");
    calls.push_back(&world.post_plan(rank, world.add_group(rank, 61, {0, 1, 2}), between, sealed,
                                     rank == 1 ? input_of(between, 0, 2) : Bytes()));
  }
  CHECK(world.run_all(50));
  for (const Call* call : calls) CHECK(call->ok());
  CHECK(calls[1]->result == input_of(between, 0, 2));
}

TEST("when a rank leaves a group that still needs it, every other rank hears so") {
  for (const Kind kind : {Kind::kRingAllReduce, Kind::kShardedAllReduce, Kind::kChainBroadcast}) {
    for (const bool posts_first : {true, false}) {
      World world(5, {});
      std::vector<Call*> calls;
      const auto post = [&] {
        for (const int rank : {1, 2, 3, 4}) calls.push_back(&world.post(rank, large(kind)));
      };
      if (posts_first) post();
      world.run_steps(5);
      world.leave(0);
      world.run_steps(5);
      if (!posts_first) post();
      CHECK(world.run_all(200));
      for (const Call* call : calls) {
        CHECK(call->error.fault == Fault::kPeerLost);
        CHECK_EQ(call->error.peer, 0);
        CHECK(has(call->error.text, "left the group"));
      }
    }
  }
}

TEST("an engine that ends before its calls leaves them to their holders") {
  World world(3, options_for(0));
  std::vector<std::shared_ptr<Collective>> kept;
  for (int rank = 0; rank < 3; ++rank) kept.push_back(world.post(rank, large()).handle);
  world.run_steps(3);
  world.engines.clear();
  kept.clear();
}

}  // namespace
}  // namespace shoal::test
