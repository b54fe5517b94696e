// Every program that is written from a schedule, through every fault of the seeded network: each
// call ends with the right bytes, or on every rank with an error that names the culprit.
//
// SHOAL_SEEDS=30 in the environment tries thirty times as many (`make test-soak`).
#include "test/trial.h"

namespace shoal::test {
namespace {

bool never_fails(int, const TestCall&) { return false; }

TEST("every program gives the right bytes, whatever the network does to its frames") {
  for_every_recipe(1, 13, 1, [](const Recipe& recipe, uint64_t seed) {
    Trial trial(recipe, seed, Trial::rough(seed), 300);
    trial.post_all();
    trial.check(never_fails);
  });
}

TEST("every program runs with the minimum of staging, slots and room on the wire") {
  for_every_recipe(2, 8, 1, [](const Recipe& recipe, uint64_t seed) {
    World::Options options = Trial::rough(seed);
    options.engine.staging_bytes = 1024;
    options.net.room = 1;
    options.net.copied = options.net.max_inline = 0;
    options.slot_quota = 1;
    Trial trial(recipe, seed, options, 600);
    trial.post_all();
    trial.check(never_fails);
    for (int rank = 0; rank < recipe.size; ++rank)
      if (trial.world.engine(rank).staging().used() != 0) trial.complain("staging is still held");
  });
}

// The number of frames that all ranks send for the calls of a trial.
uint64_t n_frames_of(const Recipe& recipe, uint64_t seed, const World::Options& options) {
  Trial trial(recipe, seed, options, 100);
  trial.post_all();
  trial.check(never_fails);
  return trial.world.net.n_sent();
}

TEST("a connection cut at any frame ends every program's calls, and the error blames it") {
  for_every_recipe(2, 5, 2, [](const Recipe& recipe, uint64_t seed) {
    World::Options options = Trial::rough(seed);
    FakeRandom random(seed);
    options.net.cuts_at = 1 + random.below(n_frames_of(recipe, seed, options));
    Trial trial(recipe, seed, options, 100);
    trial.context = ", cut at frame " + std::to_string(options.net.cuts_at);
    trial.post_all();
    trial.run_until_sent(options.net.cuts_at);
    trial.post(Trial::roll_call(9), trial.everyone());
    const auto is_cut = [](int, const TestCall& call) {
      return call.error.fault == Fault::kPeerLost &&
             (has(call.error.text, "closed the connection") ||
              has(call.error.text, "is cut; both live"));
    };
    trial.check(is_cut);
    trial.check_ended(trial.everyone(), is_cut);
  });
}

TEST("a rank that dies at any frame ends every program's calls, and all others name it") {
  for_every_recipe(2, 5, 2, [](const Recipe& recipe, uint64_t seed) {
    const World::Options options = Trial::rough(seed);
    FakeRandom random(seed);
    const uint64_t frame = random.below(n_frames_of(recipe, seed, options));
    Trial trial(recipe, seed, options, 100);
    const int victim = trial.a_rank();
    trial.context = ", rank " + std::to_string(victim) + " dies at frame " + std::to_string(frame);
    trial.post_all();
    trial.run_until_sent(frame);
    trial.world.kill(victim);
    const auto is_dead = [&](int rank, const TestCall& call) {
      return rank == victim || (call.error.fault == Fault::kPeerLost && call.error.peer == victim &&
                                has(call.error.text, "closed the connection"));
    };
    trial.check(is_dead);
    trial.check_ended(trial.everyone_but(victim), is_dead);
  });
}

TEST("a rank stopped at any frame is given up after five seconds, by name") {
  for_every_recipe(2, 5, 1, [](const Recipe& recipe, uint64_t seed) {
    World::Options options = Trial::rough(seed);
    options.step_ns = 50 * kMillisecond;
    FakeRandom random(seed);
    const uint64_t frame = random.below(n_frames_of(recipe, seed, options));
    Trial trial(recipe, seed, options, 100);
    const int victim = trial.a_rank();
    trial.context = ", rank " + std::to_string(victim) + " stops at " + std::to_string(frame);
    trial.post_all();
    trial.run_until_sent(frame);
    trial.world.stop(victim);
    trial.world.run_steps(200);
    trial.world.go_on(victim);
    const auto is_given_up = [&](int rank, const TestCall& call) {
      return call.error.fault == Fault::kPeerLost &&
             (rank == victim || (call.error.peer == victim && has(call.error.text, "silent")));
    };
    trial.check(is_given_up);
    trial.check_ended(trial.everyone(), is_given_up);
  });
}

// The call that one rank makes instead of `job`.
Job other_than(const Job& job, int size, FakeRandom& random) {
  Job other = job;
  switch (random.below(3)) {
    case 0:
      other.n_elems++;
      break;
    case 1:
      other.op = job.op == FoldOp::kMax ? FoldOp::kSum : FoldOp::kMax;
      break;
    default: {
      const auto& recipes = Recipes::all().of_size(size);
      do other = job_of(*recipes[random.below(recipes.size())], other);
      while (other.descriptor() == job.descriptor() || other.is("send_recv"));
    }
  }
  return other;
}

TEST("a rank that makes another call ends every program's calls, and the error names both calls") {
  for_every_recipe(2, 8, 1, [](const Recipe& recipe, uint64_t seed) {
    Trial trial(recipe, seed, Trial::rough(seed), 100);
    int odd = trial.a_rank();
    if (recipe.collective == "send_recv") odd = odd % 2 == 0 ? 0 : recipe.size - 1;
    Job job = trial.jobs[seed % 2];
    job.is_uneven = false;  // if all blocks of a rank are empty, no peer asks it anything
    const Job other = other_than(job, recipe.size, trial.random());
    trial.context = ", rank " + std::to_string(odd) + " calls " + other.descriptor();
    for (const int rank : trial.world.shuffled(recipe.size))
      trial.post(rank == odd ? other : job, {rank});
    trial.world.run_steps(static_cast<int>(trial.random().below(20)));
    const auto names_both = [&](int, const TestCall& call) {
      return call.error.fault == Fault::kMismatch && has(call.error.text, World::name(odd)) &&
             has(call.error.text, job.descriptor()) && has(call.error.text, other.descriptor());
    };
    trial.check(names_both);
    trial.check_ended(trial.everyone(), names_both);
  });
}

TEST("a rank that lies about a length ends every program's calls and gets the blame") {
  for_every_recipe(2, 5, 2, [](const Recipe& recipe, uint64_t seed) {
    World::Options options = Trial::rough(seed);
    options.net.room = 0;  // the liar learns why it is dropped, and blames no rank that leaves
    Trial trial(recipe, seed, options, 100);
    const int liar = trial.a_rank();
    uint64_t n_left = 1 + trial.random().below(20);  // frames with data until it lies
    const int64_t by = static_cast<int64_t>(trial.random().below(2)) * 2 - 1;
    trial.world.net.tamper = [&](int from, Header& header, Bytes& payload) {
      if (from != liar || header.type > FrameType::kRequestToSend || payload.empty() ||
          --n_left > 0)
        return;
      n_left = ~0ull;
      payload.resize(payload.size() + static_cast<size_t>(by));
      trial.context = ", rank " + std::to_string(liar) + " lies about frame type " +
                      std::to_string(static_cast<int>(header.type));
    };
    trial.post_all();
    trial.check([&](int rank, const TestCall& call) {
      return call.error.fault == Fault::kPeerLost && (rank == liar || call.error.peer == liar);
    });
  });
}

TEST("a rank that never calls makes every program's calls end at their deadline") {
  for_every_recipe(2, 5, 1, [](const Recipe& recipe, uint64_t seed) {
    World::Options options = Trial::rough(seed);
    options.step_ns = 20 * kMillisecond;
    Trial trial(recipe, seed, options, 100);
    const int absent = trial.a_rank();
    trial.context = ", rank " + std::to_string(absent) + " never calls";
    trial.post(trial.jobs[0], trial.everyone_but(absent), trial.world.now + 3 * kSecond);
    trial.check(
        [&](int, const TestCall& call) {
          return call.error.fault == Fault::kTimedOut &&
                 has(call.error.text, "reached the deadline of " + call.job.descriptor()) &&
                 (has(call.error.text, "waiting for " + World::name(absent)) ||
                  has(call.error.text, "(in the same call, perhaps"));
        },
        300);
  });
}

}  // namespace
}  // namespace shoal::test
