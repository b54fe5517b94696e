// The cost of a group's size to a rank: frames and memory, by number of ranks. Prints a line of
// numbers for each program.
//
// python tests/programs.py FILE ring:128 tree:1024    writes the programs for larger groups
// SHOAL_PROGRAMS=FILE build/native/test_scale         3 GB, most of it fake links
#include <malloc.h>

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "test/check.h"
#include "test/faults.h"

namespace {

std::atomic<int64_t> n_live_bytes{0};

}  // namespace

void* operator new(size_t n_bytes) {
  void* const memory = std::malloc(n_bytes);
  if (memory == nullptr) throw std::bad_alloc();
  n_live_bytes += static_cast<int64_t>(malloc_usable_size(memory));
  return memory;
}
void* operator new[](size_t n_bytes) { return operator new(n_bytes); }
void operator delete(void* memory) noexcept {
  if (memory != nullptr) n_live_bytes -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}
void operator delete[](void* memory) noexcept { operator delete(memory); }
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }
void operator delete[](void* memory, size_t) noexcept { operator delete(memory); }

namespace shoal::test {
namespace {

World::Options calm() {
  World::Options options;
  options.idles = 0;
  options.net.copied = 0;
  options.engine.heartbeat_ns = options.engine.suspect_ns = options.engine.dead_ns = INT64_MAX / 4;
  return options;
}

// One engine in a group of this many ranks, without links and calls.
int64_t idle_bytes(int size) {
  std::vector<std::string> names;
  std::vector<int> everyone;
  for (int rank = 0; rank < size; ++rank) {
    names.push_back(World::name(rank));
    everyone.push_back(rank);
  }
  const int64_t before = n_live_bytes;
  Engine engine(0, names, {});
  engine.add_group(7, everyone);
  return n_live_bytes - before;
}

struct Cost {
  double frames = 0;       // sent by a rank, on average
  uint64_t most = 0;       // the most received by one rank
  int64_t call_bytes = 0;  // memory of the call on a rank, besides its program and its data
};

// The number of segments that the ranks send each other.
uint64_t n_segments_sent(const std::vector<std::shared_ptr<Plan>>& plans) {
  uint64_t n = 0;
  for (const auto& plan : plans)
    for (const Step& step : plan->program->steps)
      if (step.kind == StepKind::kSend) n += plan->n_segments(step);
  return n;
}

// One call on every rank.
Cost cost_of(World& world, const Job& job, const std::vector<std::shared_ptr<Plan>>& plans) {
  const int size = world.size();
  std::vector<uint64_t> got;
  for (int rank = 0; rank < size; ++rank) got.push_back(world.net.n_delivered_to(rank));
  const uint64_t sent = world.net.n_sent();
  std::vector<TestCall*> calls;
  const int64_t before = n_live_bytes;
  for (int rank = 0; rank < size; ++rank) {
    const auto at = static_cast<size_t>(rank);
    const Bytes input = input_of(job, rank, size);
    calls.push_back(&world.post_plan(rank, *world.groups[at], job, plans[at], input));
  }
  Cost cost;
  cost.call_bytes = (n_live_bytes - before) / size - static_cast<int64_t>(job.n_elems * 8);
  CHECK(world.run_all(100 + 10 * size));
  world.run_steps(5);
  cost.frames = static_cast<double>(world.net.n_sent() - sent) / size;
  for (int rank = 0; rank < size; ++rank) {
    const auto at = static_cast<size_t>(rank);
    cost.most = std::max(cost.most, world.net.n_delivered_to(rank) - got[at]);
    if (rank % 97 == 0) CHECK(calls[at]->result == expected(job, rank, size));
  }
  return cost;
}

// One rank dies.
Cost cost_of_death(World& world) {
  const int n_left = world.size() - 1;
  std::vector<uint64_t> got;
  for (int rank = 0; rank < world.size(); ++rank) got.push_back(world.net.n_delivered_to(rank));
  world.kill(1);
  const uint64_t sent = world.net.n_sent();
  const int64_t before = n_live_bytes;
  world.run_steps(50);
  Cost cost;
  cost.frames = static_cast<double>(world.net.n_sent() - sent) / n_left;
  cost.call_bytes = (n_live_bytes - before) / n_left;
  for (int rank = 0; rank < world.size(); ++rank) {
    if (rank == 1) continue;
    cost.most =
        std::max(cost.most, world.net.n_delivered_to(rank) - got[static_cast<size_t>(rank)]);
    CHECK(world.engine(rank).state_of(1) == Engine::PeerState::kLost);
    CHECK_EQ(world.groups[static_cast<size_t>(rank)]->life.why().peer, 1);
  }
  return cost;
}

void measure(const Recipe& recipe) {
  const int64_t before = n_live_bytes;
  World world(recipe.size, calm());
  const int64_t world_bytes = (n_live_bytes - before) / recipe.size;
  Job job;
  job.n_elems = recipe.n_chunks;
  job.dtype = DType::kInt64;
  job = job_of(recipe, job);
  const int64_t unplanned = n_live_bytes;
  std::vector<std::shared_ptr<Plan>> plans;
  for (int rank = 0; rank < recipe.size; ++rank) plans.push_back(plan_of(job, rank, recipe.size));
  const int64_t plan_bytes = (n_live_bytes - unplanned) / recipe.size;
  const Cost cost = cost_of(world, job, plans);
  const double data = static_cast<double>(n_segments_sent(plans)) / recipe.size;
  const double log_size = std::log2(recipe.size);
  CHECK(cost.frames <= data + log_size);
  CHECK(cost.call_bytes <= 1024 + 512 * static_cast<int64_t>(data * 4));
  const Cost of_death = cost_of_death(world);
  CHECK(of_death.frames <= std::ceil(log_size) + 2);
  CHECK(static_cast<double>(of_death.most) <= 4 * std::ceil(log_size) + 4);
  CHECK(of_death.call_bytes <= 1024 + 512 * static_cast<int64_t>(std::ceil(log_size)));
  std::printf(
      "%s: %d ranks; frames a rank sends: %.1f (%.1f of data; most that one gets: %llu), "
      "at a death %.1f (%llu; %lld bytes); bytes on a rank: engine and group %lld, with its fake "
      "links %lld, plan %lld, call %lld\n",
      recipe.algorithm.c_str(), recipe.size, cost.frames, data,
      static_cast<unsigned long long>(cost.most), of_death.frames,
      static_cast<unsigned long long>(of_death.most), static_cast<long long>(of_death.call_bytes),
      static_cast<long long>(idle_bytes(recipe.size)), static_cast<long long>(world_bytes),
      static_cast<long long>(plan_bytes), static_cast<long long>(cost.call_bytes));
}

TEST("an unused peer takes less than 220 bytes of the engine") {
  CHECK((idle_bytes(200) - idle_bytes(100)) / 100 < 220);
}

TEST("beyond its data a call costs a rank O(log n) frames, and memory for its steps only") {
  for (const Recipe& recipe : Recipes::all().recipes())
    if (recipe.size > 1 && recipe.collective == "all_reduce" &&
        (recipe.algorithm == "ring" || recipe.algorithm == "tree"))
      measure(recipe);
}

}  // namespace
}  // namespace shoal::test
