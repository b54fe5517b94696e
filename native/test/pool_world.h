// Workers and servers in a world: workers post, servers serve.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "engine/segments/served_calls.h"
#include "test/check.h"
#include "test/pool.h"
#include "test/world.h"

namespace shoal::test {

class Pool {
 public:
  Pool(int n_workers, int n_servers, const World::Options& options)
      : world(n_workers + n_servers, options), n_workers_(n_workers) {}

  void serve(const PoolJob& job) {
    for (int rank = n_workers_; rank < world.size(); ++rank) serve(rank, job);
  }
  void serve(int rank, const PoolJob& job) {
    Group& group = *world.groups[static_cast<size_t>(rank)];
    const auto plan = plan_of(job, rank);
    CHECK_EQ(ServedCalls::refusal(group, *plan), "");
    world.engine(rank).serve(group, plan, 0);
  }
  TestCall& post(int rank, const PoolJob& job, int64_t deadline_ns = World::kNever) {
    return world.post_plan(rank, *world.groups[static_cast<size_t>(rank)], job.job(),
                           plan_of(job, rank), input_of(job, rank), deadline_ns);
  }
  // On all workers, with turns between the posts.
  void post_all(const PoolJob& job) {
    for (const int rank : world.shuffled(n_workers_)) {
      calls.push_back({rank, job, &post(rank, job)});
      if (world.random().chance(0.3)) world.step();
    }
  }
  void check(const std::string& where) {
    if (!world.run_all()) fail(__FILE__, __LINE__, where + ": something waits for ever");
    for (const auto& [rank, job, call] : calls)
      if (!call->ok() || call->result != expected(job))
        fail(__FILE__, __LINE__,
             where + ", " + job.descriptor() + ": " +
                 (call->error ? call->error.text : "not finished, or a wrong result"));
    world.run_steps(100);
    for (int rank = n_workers_; rank < world.size(); ++rank)
      CHECK_EQ(world.engine(rank).n_in_flight(), 0u);
    CHECK_EQ(world.net.violation(), "");
  }

  World world;
  struct Posted {
    int rank;
    PoolJob job;
    TestCall* call;
  };
  std::vector<Posted> calls;

 private:
  const int n_workers_;
};

inline PoolJob random_pool_job(FakeRandom& random, int n_workers, int n_servers, uint64_t key) {
  constexpr FoldOp kOps[] = {FoldOp::kSum, FoldOp::kAvg, FoldOp::kMax};
  PoolJob job{n_workers, n_servers, key};
  job.n_elems = random.below(random.chance(0.3) ? 3000 : 100);
  job.op = kOps[random.below(3)];
  job.segment_bytes = random.chance(0.5) ? 64 : 256;
  job.seed = random.below(1000);
  job.is_uneven = random.chance(0.4);
  if (job.op != FoldOp::kMax && random.chance(0.3)) job.codec = codec_of(job.seed);
  if (random.chance(0.3)) job.subject = 1u << 24 | static_cast<Subject>(job.seed);
  return job;
}

}  // namespace shoal::test
