// How news of a loss or an end spreads: every living rank gets it, in the same words, whichever
// ranks die meanwhile, for log n frames a rank.
#include <cmath>
#include <set>

#include "test/check.h"
#include "test/faults.h"

namespace shoal::test {
namespace {

// ---- states

TEST("the state of a peer makes only the permitted transitions") {
  using State = PeerState;
  const std::set<std::pair<State, State>> allowed = {
      {State::kAlive, State::kSilent}, {State::kAlive, State::kCut},
      {State::kAlive, State::kLeft},   {State::kAlive, State::kGone},
      {State::kAlive, State::kLost},   {State::kSilent, State::kAlive},
      {State::kSilent, State::kCut},   {State::kSilent, State::kLeft},
      {State::kSilent, State::kLost},  {State::kCut, State::kLost},
  };
  for (size_t one = 0; one < kPeerStates; ++one)
    for (size_t other = 0; other < kPeerStates; ++other) {
      const auto now = static_cast<State>(one), next = static_cast<State>(other);
      CHECK_EQ(Peers::may_follow(now, next), allowed.count({now, next}) != 0);
    }
  Peers peers(3, 0);
  CHECK(!peers.become(0, State::kLost));
  CHECK(peers.become(1, State::kLost));
  CHECK(!peers.become(1, State::kAlive));
  CHECK_EQ(std::string(name_of(peers[0])) + name_of(peers[1]) + name_of(peers[2]), "selflostalive");
}

TEST("a group ends once, with the first reason, and stays ended") {
  using State = GroupLife::State;
  const std::set<std::pair<State, State>> allowed = {
      {State::kUncreated, State::kInUse}, {State::kUncreated, State::kEnded},
      {State::kInUse, State::kDeparted},  {State::kInUse, State::kDisputed},
      {State::kInUse, State::kEnded},     {State::kDeparted, State::kDisputed},
      {State::kDeparted, State::kEnded},  {State::kDisputed, State::kEnded},
  };
  for (size_t one = 0; one < GroupLife::kStates; ++one)
    for (size_t other = 0; other < GroupLife::kStates; ++other) {
      const auto now = static_cast<State>(one), next = static_cast<State>(other);
      CHECK_EQ(GroupLife::may_follow(now, next), allowed.count({now, next}) != 0);
    }
  GroupLife life;
  CHECK(!life.depart({Fault::kPeerLost, 1, "left"}));
  CHECK(life.make());
  CHECK(life.depart({Fault::kPeerLost, 1, "left"}));
  CHECK(!life.depart({Fault::kPeerLost, 2, "left too"}));
  CHECK_EQ(life.departed().peer, 1);
  CHECK(!life.why());
  CHECK(life.end({Fault::kClosed, 3, "enough"}));
  CHECK(!life.end({Fault::kPeerLost, 4, "later"}));
  CHECK(!life.make());
  CHECK_EQ(life.why().text, "enough");
  CHECK_EQ(std::string(name_of(life.state())), "ended");
}

// ---- the graph

// The ranks that news from `first` reaches, if each living rank forwards it to its neighbours.
std::set<int> reached(int first, int size, const std::vector<bool>& lives, int& most_sends) {
  std::set<int> known = {first};
  std::vector<int> left = {first};
  while (!left.empty()) {
    const int one = left.back();
    left.pop_back();
    int n_sends = 0;
    for_each_neighbour(
        one, size, [&](int at) { return lives[static_cast<size_t>(at)]; },
        [&](int at) {
          CHECK(at != one && lives[static_cast<size_t>(at)]);
          n_sends++;
          if (known.insert(at).second) left.push_back(at);
        });
    most_sends = std::max(most_sends, n_sends);
  }
  return known;
}

TEST("whichever ranks are dead, news reaches all living ranks in at most log n messages each") {
  FakeRandom random(1);
  for (const int size : {1, 2, 3, 4, 5, 7, 8, 13, 16, 128, 1000}) {
    for (int round = 0; round < 200; ++round) {
      std::vector<bool> lives(static_cast<size_t>(size));
      const double chance = random.chance(0.5) ? 0.9 : 0.2;
      for (size_t at = 0; at < lives.size(); ++at) lives[at] = random.chance(chance);
      const int first = static_cast<int>(random.below(static_cast<uint64_t>(size)));
      lives[static_cast<size_t>(first)] = true;
      int most_sends = 0;
      const auto known = reached(first, size, lives, most_sends);
      CHECK_EQ(known.size(), std::count(lives.begin(), lives.end(), true));
      CHECK(most_sends <= static_cast<int>(std::ceil(std::log2(size))));
      if (size > 100 && round > 20) break;
    }
  }
}

// ---- deaths

void check_same_text(const std::vector<TestCall*>& calls, const std::set<int>& without) {
  const TestCall* first = nullptr;
  for (size_t rank = 0; rank < calls.size(); ++rank) {
    if (without.count(static_cast<int>(rank)) != 0) continue;
    if (first == nullptr) first = calls[rank];
    CHECK(calls[rank]->error.fault == first->error.fault);
    CHECK_EQ(calls[rank]->error.peer, first->error.peer);
    CHECK_EQ(calls[rank]->error.text, first->error.text);
  }
}

std::vector<TestCall*> post_all(World& world, const std::vector<int>& ranks, uint64_t group = 0) {
  std::vector<TestCall*> calls;
  for (const int rank : ranks)
    calls.push_back(group == 0
                        ? &world.post(rank, large())
                        : &world.post_in(rank, world.add_group(rank, group, ranks), large()));
  return calls;
}

std::vector<int> all_but(int size, const std::set<int>& without) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank)
    if (without.count(rank) == 0) ranks.push_back(rank);
  return ranks;
}

TEST("whichever rank dies at whichever step, every survivor names it in two seconds, in one text") {
  for (int size = 3; size <= 6; ++size)
    for (int victim = 0; victim < size; ++victim)
      for (int step = 0; step < 12; ++step) {
        World world(size, options_for(static_cast<uint64_t>(size * 1000 + victim * 100 + step)));
        const auto calls = post_all(world, all_but(size, {}));
        world.run_steps(step);
        const int64_t killed_ns = world.now;
        world.kill(victim);
        CHECK(world.run_all(2000));
        CHECK(world.now - killed_ns <= 2 * kSecond);
        bool all_failed = true;
        for (const int rank : all_but(size, {victim}))
          all_failed &= static_cast<bool>(calls[static_cast<size_t>(rank)]->error);
        if (all_failed) check_same_text(calls, {victim});
        world.run_steps(30);
        for (const int rank : all_but(size, {victim})) {
          CHECK_EQ(world.groups[static_cast<size_t>(rank)]->life.why().peer, victim);
          CHECK(world.engine(rank).state_of(victim) == PeerState::kLost);
        }
      }
}

TEST("two deaths one after the other are both known everywhere, and the other ranks work on") {
  const int size = 6;
  for (int second = 1; second < size; ++second)
    for (int step = 0; step < 10; ++step) {
      World world(size, options_for(static_cast<uint64_t>(second * 100 + step)));
      const auto calls = post_all(world, all_but(size, {}));
      world.run_steps(5);
      world.kill(0);
      world.run_steps(step);
      world.kill(second);
      CHECK(world.run_all(2000));
      world.run_steps(60);
      const auto rest = all_but(size, {0, second});
      for (const int rank : rest)
        for (const int victim : {0, second}) {
          Group& with = world.add_group(rank, 90 + static_cast<uint64_t>(victim), {victim, rank});
          if (with.life.why().peer != victim)
            fail("two", second * 100 + step,
                 "rank " + std::to_string(rank) + " does not know " + std::to_string(victim) +
                     ", state " + name_of(world.engine(rank).state_of(victim)));
        }
      for (const TestCall* call : post_all(world, rest, 60)) CHECK(!call->finished);
      CHECK(world.run_all(5000));
      for (const TestCall* call : calls) CHECK(call->error);
    }
}

// Only rank 0 finds out by itself that rank 5 is lost, and the ranks that it notifies die.
TEST("news reaches the living even if all its first receivers die with the culprit") {
  const int size = 9;
  const std::set<int> notified = {1, 2, 4, 8};
  for (int step = 0; step < 8; ++step) {
    World world(size, options_for(static_cast<uint64_t>(2 * step)));
    const auto rest = all_but(size, notified);
    const auto calls = post_all(world, rest, 60);
    world.engine(0).peer_lost(5, "is gone, rank 0 says");
    world.engine(0).progress();
    world.run_steps(step);
    for (const int rank : notified) world.kill(rank);
    CHECK(world.run_all(2000));
    for (size_t at = 0; at < rest.size(); ++at) {
      CHECK(calls[at]->error.fault == Fault::kPeerLost);
      CHECK_EQ(calls[at]->error.peer, rest[at] == 5 ? 0 : 5);
      CHECK(has(calls[at]->error.text, "is gone, rank 0 says"));
    }
  }
}

TEST("a death costs a rank log n + 2 frames, and the end of a group log n") {
  for (const int size : {4, 8, 16, 33, 64}) {
    World::Options options;
    options.idles = 0;
    options.engine.heartbeat_ns = options.engine.dead_ns = INT64_MAX / 4;
    World world(size, options);
    const double log_size = std::ceil(std::log2(size));
    const auto frames_since = [&](uint64_t before) {
      return static_cast<double>(world.net.n_sent() - before) / size;
    };
    uint64_t before = world.net.n_sent();
    Group* first = nullptr;
    for (int rank = 0; rank < size; ++rank) {
      Group& group = world.add_group(rank, 60, all_but(size, {}));
      if (rank == 0) first = &group;
    }
    world.engine(0).abort_group(*first, {Fault::kClosed, 0, "enough"}, true);
    world.run_steps(50);
    CHECK(frames_since(before) <= log_size);
    before = world.net.n_sent();
    world.kill(1);
    world.run_steps(50);
    CHECK(frames_since(before) <= log_size + 2);
  }
}

// ---- ends of groups

TEST("an abort reaches every member even if its first receivers have no such group, or closed it") {
  const int size = 9;
  for (int step = 0; step < 20; ++step) {
    World world(size, options_for(static_cast<uint64_t>(step)));
    const auto everyone = all_but(size, {});
    for (const int rank : {1, 4})  // rank 0 notifies them, and 2 and 8, which do not know the group
      world.engine(rank).drop_group(world.add_group(rank, 60, everyone));
    std::vector<Group*> groups;
    for (const int rank : {0, 3, 5, 6, 7}) groups.push_back(&world.add_group(rank, 60, everyone));
    world.engine(0).abort_group(*groups[0], {Fault::kClosed, 0, "enough"}, true);
    world.run_steps(100);
    for (const Group* group : groups) CHECK_EQ(group->life.why().text, "enough");
    for (const int rank : {2, 8})
      CHECK_EQ(world.add_group(rank, 60, everyone).life.why().text, "enough");
  }
}

TEST("a rank that ends a group and leaves at once is never blamed for leaving") {
  const int size = 8;
  for (uint64_t seed = 0; seed < seeds(30); ++seed) {
    World world(size, options_for(seed));
    const auto calls = post_all(world, all_but(size, {}));
    world.run_steps(static_cast<int>(seed % 5));
    world.engine(0).abort_group(*world.groups[0], {Fault::kClosed, 0, "enough"}, true);
    world.leave(0);
    CHECK(world.run_all(500));
    check_same_text(calls, {});
    CHECK_EQ(calls[3]->error.text, "enough");
  }
}

TEST("a rank that learns of a death and leaves at once is never named instead of the dead") {
  const int size = 8;
  for (uint64_t seed = 0; seed < seeds(30); ++seed) {
    World world(size, options_for(seed));
    const auto calls = post_all(world, all_but(size, {}));
    world.run_steps(static_cast<int>(seed % 5));
    world.engine(0).peer_lost(5, "is gone, rank 0 says");
    world.engine(0).progress();
    world.leave(0);
    CHECK(world.run_all(500));
    for (int rank = 1; rank < size; ++rank)
      if (rank != 5) CHECK_EQ(calls[static_cast<size_t>(rank)]->error.peer, 5);
  }
}

// ---- a third is asked

const World::Options& quiet() {
  static const World::Options options;
  return options;
}

TEST("of two ranks cut from each other the higher is out, and all ranks give the same reason") {
  for (int size = 3; size <= 6; ++size)
    for (int low = 0; low < size; ++low)
      for (int high = low + 1; high < size; ++high) {
        World world(size, options_for(static_cast<uint64_t>(size * 100 + low * 10 + high)));
        const auto calls = post_all(world, all_but(size, {}));
        world.run_steps(high);
        world.net.cut(low, high);
        CHECK(world.run_all(500));
        check_same_text(calls, {});
        CHECK(calls[0]->error.fault == Fault::kPeerLost);
        CHECK_EQ(calls[0]->error.peer, high);
        CHECK(has(calls[0]->error.text, "is out: the network between " + World::name(low) +
                                            " and " + World::name(high) +
                                            " is cut; both live, and rank "));
        CHECK(has(calls[0]->error.text, " reaches both"));
        for (const int one : {low, high})
          for (int rank = 0; rank < size; ++rank)
            if (rank != low && rank != high)
              CHECK(world.engine(rank).state_of(one) == PeerState::kAlive);
      }
}

TEST("a rank that only one other cannot reach is not taken for dead") {
  for (const auto& [one, other] : {std::pair{1, 3}, {3, 1}}) {
    World world(4, quiet());
    world.run_steps(500);
    world.stop_reading(one, other);
    world.run_steps(6000);
    const auto calls = post_all(world, all_but(4, {}));
    CHECK(world.run_all(100));
    check_same_text(calls, {});
    CHECK_EQ(calls[0]->error.peer, 3);
    CHECK(has(calls[0]->error.text, "is cut; both live"));
    CHECK(world.engine(one).state_of(other) == PeerState::kLost);
    CHECK(world.engine(other).state_of(one) == PeerState::kLost);
  }
}

TEST("a rank that sends again before the third has answered counts as alive") {
  World world(3, quiet());
  world.run_steps(500);
  world.stop_reading(0, 1);
  world.run_steps(2000);
  world.stop_reading(2, 1);  // so that rank 2, which rank 0 asks, gets no answer from rank 1
  CHECK(world.run([&] { return world.engine(0).state_of(1) == PeerState::kSilent; }, 7000));
  world.read_again(0, 1);
  CHECK(world.run([&] { return world.engine(0).state_of(1) == PeerState::kAlive; }, 100));
  world.read_again(2, 1);
  const auto calls = post_all(world, all_but(3, {}));
  CHECK(world.run_all(500));
  for (const TestCall* call : calls) CHECK(call->ok());
  world.run_steps(10'000);
  for (const int rank : {0, 2}) CHECK(world.engine(rank).state_of(1) == PeerState::kAlive);
}

TEST("if the asked rank dies the next is asked, and without one the peer is taken for dead") {
  for (int step = 0; step < 6; ++step) {
    World world(4, options_for(static_cast<uint64_t>(step)));
    const auto calls = post_all(world, {1, 2}, 60);
    world.net.cut(1, 2);
    world.run_steps(step);
    world.kill(3);  // which both ask: 1 + 2
    CHECK(world.run_all(500));
    for (const TestCall* call : calls) {
      CHECK_EQ(call->error.peer, 2);
      CHECK(has(call->error.text, "is cut; both live"));
    }
    const std::string& text = calls[0]->error.text;
    CHECK(has(text, World::name(0) + " reaches both") ||
          has(text, World::name(3) + " reaches both"));
  }
  World world(2, quiet());
  const auto calls = post_all(world, {0, 1});
  world.net.cut(0, 1);
  CHECK(world.run_all(100));
  CHECK_EQ(calls[0]->error.peer, 1);
  CHECK_EQ(calls[1]->error.peer, 0);
  CHECK(has(calls[0]->error.text, "closed the connection"));
}

TEST("a rank cut off from all others is the lost one") {
  for (uint64_t seed = 0; seed < seeds(20); ++seed) {
    const int size = 5;
    World world(size, options_for(seed));
    const auto calls = post_all(world, all_but(size, {}));
    world.run_steps(3);
    for (int rank = 0; rank < size; ++rank)
      if (rank != 2) world.net.cut(2, rank);
    CHECK(world.run_all(500));
    check_same_text(calls, {2});
    CHECK_EQ(calls[0]->error.peer, 2);
    CHECK(has(calls[0]->error.text, "closed the connection"));
    CHECK(calls[2]->error.peer != 2);
  }
}

TEST("a rank that asks about a dead one gets no answer that it lives") {
  // Rank 0 has not yet polled its link with the dead rank, and is asked all the same.
  for (uint64_t seed = 0; seed < seeds(40); ++seed) {
    World::Options options = options_for(seed);
    options.net.delays = 0.5;
    options.net.longest_delay = 40;
    World world(4, options);
    const auto calls = post_all(world, all_but(4, {}));
    world.run_steps(static_cast<int>(seed % 7));
    world.kill(3);
    CHECK(world.run_all(1000));
    world.run_steps(50);
    for (int rank = 0; rank < 3; ++rank) {
      CHECK_EQ(world.groups[static_cast<size_t>(rank)]->life.why().peer, 3);
      CHECK(has(world.groups[static_cast<size_t>(rank)]->life.why().text, "its process died"));
    }
  }
}

}  // namespace
}  // namespace shoal::test
