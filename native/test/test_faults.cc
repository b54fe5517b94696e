// How the protocol core fails: every rank gets the reason, no call waits for ever, and memory is
// free once a call has failed (World frees it inside on_finished; the address sanitizer watches).
#include "test/check.h"
#include "test/faults.h"

namespace shoal::test {
namespace {

// ---- death

TEST("when a rank dies, every survivor's calls fail and name it") {
  for (uint64_t seed = 0; seed < seeds(120); ++seed) {
    const int size = 2 + static_cast<int>(seed % 5);
    World world(size, options_for(seed));
    FakeRandom random(seed);
    const int victim = static_cast<int>(random.below(static_cast<uint64_t>(size)));
    std::vector<TestCall*> calls;
    for (uint64_t key = 0; key < 6; ++key) {
      Job job = random_job(random, key, size, 3000);
      // A ring cannot end without the victim on any rank, though most are not its neighbours.
      if (key == 0) job = large();
      for (int rank = 0; rank < size; ++rank) calls.push_back(&world.post(rank, job));
    }
    world.run_steps(static_cast<int>(random.below(25)));
    world.kill(victim);
    CHECK(world.run_all(500));
    check_no_wrong_result(calls, world, seed);
    for (size_t at = 0; at < calls.size(); ++at) {
      const TestCall& call = *calls[at];
      if (static_cast<int>(at) % size == victim || call.ok()) continue;
      CHECK(call.error.fault == Fault::kPeerLost);
      CHECK_EQ(call.error.peer, victim);
      CHECK(has(call.error.text, "closed the connection"));
      CHECK(has(call.error.doing, call.job.descriptor()));
    }
    world.run_steps(20);
    for (int rank = 0; rank < size; ++rank) {
      if (rank == victim) continue;
      const TestCall& later = world.post(rank, large(Kind::kDirectAllReduce, 1));
      CHECK(later.finished);
      CHECK_EQ(later.error.peer, victim);
    }
    world.run_steps(50);
    CHECK(world.is_untouched());
    CHECK_EQ(world.net.violation(), "");
  }
}

TEST("a peer's writes to a survivor's memory after its call failed never become a result") {
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
    std::vector<TestCall*> calls;
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

TEST("a new group with a dead rank fails at once, and one without it works") {
  World world(3, {});
  world.kill(1);
  world.run_steps(20);
  const TestCall& with = world.post_in(0, world.add_group(0, 20, {0, 1}), large());
  CHECK(with.finished);
  CHECK_EQ(with.error.peer, 1);
  const Job job = large();
  const TestCall& on_0 = world.post_in(0, world.add_group(0, 21, {0, 2}), job);
  const TestCall& on_2 = world.post_in(2, world.add_group(2, 21, {0, 2}), job);
  CHECK(world.run_all(500));
  CHECK(on_0.result == expected(job, 0, 2));
  CHECK(on_2.result == expected(job, 1, 2));
}

TEST("a cut between two ranks ends their group on every rank") {
  for (uint64_t seed = 0; seed < seeds(30); ++seed) {
    World world(4, options_for(seed));
    std::vector<TestCall*> calls;
    for (int rank = 0; rank < 4; ++rank) calls.push_back(&world.post(rank, large()));
    world.run_steps(static_cast<int>(seed % 10));
    world.net.cut(1, 2);
    CHECK(world.run_all(500));
    for (const TestCall* call : calls) {
      CHECK(call->error.fault == Fault::kPeerLost);
      CHECK_EQ(call->error.peer, 2);
      CHECK(has(call->error.text, "is cut; both live"));
    }
  }
}

TEST("two ranks that lost each other still serve all other ranks") {
  for (uint64_t seed = 0; seed < seeds(30); ++seed) {
    World world(4, options_for(seed));
    world.post(0, large());
    world.run_steps(static_cast<int>(seed % 10));
    world.net.cut(1, 2);
    // Groups with one of the two, made before and after; and one with both.
    std::vector<TestCall*> calls;
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
      const TestCall& call = world.post_in(rank, world.add_group(rank, 70, {0, 1, 2, 3}), large());
      CHECK(call.finished);
      CHECK(call.error.fault == Fault::kPeerLost);
    }
  }
}

TEST("frames that are lost, cut or corrupt never cause a wrong result or a hang") {
  int n_corrupt_texts = 0;
  for (uint64_t seed = 0; seed < seeds(150); ++seed) {
    const int size = 2 + static_cast<int>(seed % 4);
    World::Options options = options_for(seed);
    options.net.corrupts = seed % 3 == 0 ? 0 : 0.005;
    options.net.cuts = seed % 3 == 1 ? 0 : 0.005;
    World world(size, options);
    FakeRandom random(seed);
    std::vector<TestCall*> calls;
    for (uint64_t key = 0; key < 6; ++key) {
      const Job job = random_job(random, key, size, 1000);
      for (int rank = 0; rank < size; ++rank) calls.push_back(&world.post(rank, job));
    }
    CHECK(world.run_all(2000));
    check_no_wrong_result(calls, world, seed);
    for (const TestCall* call : calls) {
      if (call->ok()) continue;
      CHECK(call->error.fault == Fault::kPeerLost);
      // An evicted rank without the notice finds its links gone, and a third that reaches both.
      CHECK(options.net.cuts > 0 || has(call->error.text, "corrupt") ||
            has(call->error.text, "closed the connection") ||
            has(call->error.text, "is cut; both live"));
      n_corrupt_texts += has(call->error.text, "corrupt");
    }
    world.run_steps(30);
    CHECK(world.is_untouched());
    CHECK_EQ(world.net.violation(), "");
  }
  CHECK(n_corrupt_texts > 20);
}

// ---- time

TEST("a deadline ends the call on every rank and names the ranks that it waited for") {
  for (const Kind kind : {Kind::kDirectAllReduce, Kind::kShardedAllReduce, Kind::kRingAllReduce}) {
    World world(4, {});
    std::vector<TestCall*> calls;
    for (const int rank : {0, 1, 3})  // rank 2 never calls
      calls.push_back(&world.post(rank, large(kind), world.now + 3 * kSecond));
    CHECK(world.run_all(3300));
    for (const TestCall* call : calls) {
      CHECK(call->error.fault == Fault::kTimedOut);
      CHECK(has(call->error.text, "reached the deadline of " + call->job.descriptor()));
      CHECK(call->finished_ns >= 4 * kSecond);
    }
    const std::string& text = calls[0]->error.text;
    const std::string blamed = text.substr(text.find("waiting for"));
    // In a ring a rank may see only that its neighbours, which wait themselves, send nothing.
    if (kind != Kind::kRingAllReduce) CHECK_EQ(blamed, "waiting for " + World::name(2));
    CHECK(blamed == "waiting for " + World::name(2) || has(blamed, "(in the same call, perhaps"));
  }
}

TEST("a deadline names eight ranks and counts the others") {
  World world(13, {});
  const TestCall& call = world.post(0, large(Kind::kShardedAllReduce), world.now + kSecond);
  CHECK(world.run_all(1200));
  CHECK(has(call.error.text, World::name(8) + " and 4 more"));
  CHECK(!has(call.error.text, World::name(9)));
}

TEST("a stall of three seconds is harmless, and one of more than five is a death") {
  for (const int stall_ms : {3000, 6000}) {
    World world(3, {});
    world.run_steps(500);
    std::vector<TestCall*> calls;
    for (int rank = 0; rank < 3; ++rank) calls.push_back(&world.post(rank, large()));
    world.stop(1);
    world.run_steps(stall_ms);
    CHECK_EQ(calls[0]->finished, stall_ms > 5000);
    world.go_on(1);
    CHECK(world.run_all(500));
    for (int rank = 0; rank < 3; ++rank) {
      const TestCall& call = *calls[static_cast<size_t>(rank)];
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

TEST("a rank that was given up fails its own calls and no others") {
  World world(4, {});
  const TestCall& mine = world.post(1, large());
  world.stop(1);
  world.run_steps(6000);
  // The other ranks have dropped it and work on without it.
  std::vector<TestCall*> calls;
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

TEST("a rank that one peer gave up learns so, and gets no false reports of other deaths") {
  World world(3, {});
  world.engine(0).peer_lost(1, "is gone, rank 0 says");
  world.engine(0).progress();
  // Rank 1 learns of it before rank 2 does, and rank 2 reads rank 1's frames first.
  for (const auto& [rank, peer] : {std::pair{1, 0}, {2, 1}, {2, 0}}) {
    if (world.engine(rank).link(peer) == nullptr) continue;
    world.engine(rank).link(peer)->pump(world.engine(rank));
    world.engine(rank).progress();
  }
  world.run_steps(10);
  CHECK(world.engine(1).state_of(0) == Engine::PeerState::kLost);
  CHECK(world.engine(2).state_of(1) == Engine::PeerState::kAlive);
  CHECK(world.engine(2).state_of(0) == Engine::PeerState::kAlive);
  CHECK(has(world.groups[1]->life.why().text, "gave this rank up: this rank is gone, rank 0 says"));
  for (const Group* group : world.groups) CHECK(group->life.why().fault == Fault::kPeerLost);
}

// Rank 2 is stopped with an unread segment of rank 0's in a slot, and given up; the others work on
// until that slot holds other data. Then it continues. `notified`: it can read that it was given
// up; otherwise it sees only the end of its links, as if a ring had been full.
TestCall& woken_zombie(World& world, bool notified) {
  if (!notified)
    world.net.tamper = [](int, Header& header, Bytes& words) {
      if (header.type != FrameType::kLost) return;
      header.type = FrameType::kHeartbeat;
      words.clear();
      header.length = 0;
    };
  Job job = large(Kind::kDirectBroadcast, 64);
  job.segment_bytes = 256;
  TestCall& mine = world.post(2, job);
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

TEST("a rank given up while stopped never reads a reused slot as its message") {
  for (uint64_t seed = 0; seed < seeds(20); ++seed) {
    World::Options options;
    options.net.seed = seed;
    options.net.shares_memory = true;
    options.net.max_inline = 64;
    options.shares_buffers = 0;
    World world(3, options);
    const bool notified = seed % 2 == 0;
    const TestCall& mine = woken_zombie(world, notified);
    CHECK(world.run_all(200));
    CHECK(!mine.ok());
    CHECK(mine.error.fault == Fault::kPeerLost);
    if (notified) CHECK(has(mine.error.text, "gave this rank up"));
  }
}

TEST("a rank that was stopped does not blame the others for its own absence") {
  World world(2, {});
  world.run_steps(1000);
  // All ranks stop, as when a laptop sleeps.
  world.stop(0);
  world.stop(1);
  world.run_steps(60'000);
  world.go_on(0);
  world.go_on(1);
  const TestCall& on_0 = world.post(0, large());
  const TestCall& on_1 = world.post(1, large());
  CHECK(world.run_all(500));
  CHECK(on_0.ok());
  CHECK(on_1.ok());
}

TEST("a rank that is often stopped itself still finds a silent one") {
  World world(2, {});
  world.run_steps(1000);
  world.stop(1);
  for (int n = 0; n < 3; ++n) {
    world.run_steps(2000);
    world.stop(0);
    world.run_steps(2500);  // longer than `suspect_ns`
    world.go_on(0);
  }
  world.run_steps(200);
  CHECK(world.engine(0).state_of(1) == Engine::PeerState::kLost);
}

TEST("heartbeats alone keep an idle connection alive") {
  World world(3, {});
  world.run_steps(20'000);
  for (int rank = 0; rank < 3; ++rank)
    for (int peer = 0; peer < 3; ++peer)
      CHECK(rank == peer || world.engine(rank).state_of(peer) == Engine::PeerState::kAlive);
}

}  // namespace
}  // namespace shoal::test
