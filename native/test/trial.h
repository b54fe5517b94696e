// One algorithm in a world of faults that every program must survive.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "test/check.h"
#include "test/faults.h"

namespace shoal::test {

// Some calls of one recipe on every rank of a world of its size. The verdict at the end has all
// that is needed to run them again.
class Trial {
 public:
  static constexpr int kCalls = 2;

  Trial(const Recipe& recipe, uint64_t seed, const World::Options& options, uint64_t most_elems)
      : world(recipe.size, options), recipe_(recipe), seed_(seed), random_(seed) {
    for (uint64_t key = 1; key <= kCalls; ++key) {
      Job job = random_job(random_, key, recipe.size, most_elems);
      job.is_uneven = random_.chance(0.5);
      // One job for the collective's meaning, one for the order of its folds (truth.h).
      job.dtype = key == 1 ? DType::kInt64 : DType::kFloat32;
      job.n_elems = 1 + random_.below(key == 1 ? most_elems : 20);
      jobs.push_back(job_of(recipe, job));
    }
  }
  // The faults that do not change bytes.
  static World::Options rough(uint64_t seed) {
    constexpr size_t kInlines[] = {0, 16, 128, 1024};
    World::Options options;
    options.net.seed = seed;
    options.net.shares_memory = seed % 2 == 1;
    options.net.max_inline = kInlines[seed / 2 % 4];
    options.net.delays = options.net.splits = options.net.reads_late = 0.2;
    options.net.reports_late = options.net.reorders = 0.2;
    options.net.refuses_share = 0.3;
    options.net.moves_late = options.net.releases_late = 0.4;
    options.net.copied = 32;
    options.net.room = seed % 5 == 0 ? 4 : 0;
    options.slot_quota = 1 + static_cast<uint32_t>(seed / 8 % 3);
    return options;
  }

  // Posts `job` on these ranks, one after the other.
  void post(const Job& job, const std::vector<int>& ranks, int64_t deadline_ns = World::kNever) {
    for (const int rank : ranks) {
      calls.emplace_back(rank, &world.post(rank, job, deadline_ns));
      if (random_.chance(0.3)) world.step();
    }
  }
  void post_all(int64_t deadline_ns = World::kNever) {
    for (const Job& job : jobs) post(job, world.shuffled(world.size()), deadline_ns);
  }
  // Runs until `n_frames` have been sent, or all calls are over.
  void run_until_sent(uint64_t n_frames) {
    world.run([&] { return world.net.n_sent() >= n_frames || world.n_unfinished() == 0; });
  }
  // Each call is over and has the right result, or an error that `is_fine` accepts; no rank has
  // touched memory that went back to its owner.
  void check(const std::function<bool(int rank, const TestCall&)>& is_fine,
             int most_steps = 20'000) {
    if (!world.run_all(most_steps)) complain("something waits for ever");
    world.run_steps(30);
    for (const auto& [rank, call] : calls) {
      const std::string who = "rank " + std::to_string(rank) + ", " + call->job.descriptor();
      if (!call->finished) complain(who + " is not finished");
      if (call->ok() && call->result != expected(call->job, rank, world.size()))
        complain(who + " has a wrong result and no error");
      if (call->error && !is_fine(rank, *call))
        complain(who + ": \"" + call->error.text + "\", peer " + std::to_string(call->error.peer) +
                 ", fault " + std::to_string(static_cast<int>(call->error.fault)));
    }
    if (!world.is_untouched()) complain("memory was touched after its call had ended");
    if (!world.net.violation().empty()) complain(world.net.violation());
  }
  void complain(const std::string& what) {
    fail("trial", static_cast<int>(seed_),
         recipe_.collective + " by " + recipe_.algorithm + ", size " +
             std::to_string(recipe_.size) + ", root " + std::to_string(recipe_.root) + ", hosts " +
             recipe_.hosts + ", seed " + std::to_string(seed_) + context + ": " + what);
  }
  // For a group that has ended on some ranks: all of `ranks` learn of it by the next call.
  void check_ended(const std::vector<int>& ranks,
                   const std::function<bool(int rank, const TestCall&)>& is_fine) {
    calls.clear();
    post(roll_call(10), ranks);
    check(is_fine);
    for (const auto& [rank, call] : calls)
      if (call->ok()) complain("rank " + std::to_string(rank) + " never learns of it");
  }
  // A call in which every rank needs every other.
  static Job roll_call(uint64_t key) {
    Job job;
    job.kind = Kind::kDirectAllReduce;
    job.key = key;
    job.n_elems = 5;
    return job;
  }
  std::vector<int> everyone_but(int absent) const {
    std::vector<int> ranks;
    for (int rank = 0; rank < world.size(); ++rank)
      if (rank != absent) ranks.push_back(rank);
    return ranks;
  }
  std::vector<int> everyone() const { return everyone_but(-1); }

  FakeRandom& random() { return random_; }
  int a_rank() { return static_cast<int>(random_.below(static_cast<uint64_t>(recipe_.size))); }

  World world;
  std::vector<Job> jobs;
  std::vector<std::pair<int, TestCall*>> calls;
  std::string context;  // the fault

 private:
  const Recipe& recipe_;
  const uint64_t seed_;
  FakeRandom random_;
};

// `body(recipe, seed)`, with seeds that no two recipes share, so that media and faults vary.
template <class Body>
void for_every_recipe(int least_size, int most_size, uint64_t n_seeds, Body body) {
  uint64_t seed = 0;
  for (const Recipe& recipe : Recipes::all().recipes()) {
    if (recipe.size < least_size || recipe.size > most_size) continue;
    for (uint64_t n = 0; n < seeds(n_seeds); ++n) body(recipe, seed++);
  }
}

}  // namespace shoal::test
