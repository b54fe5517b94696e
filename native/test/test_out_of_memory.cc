// Large allocations fail from a moment on: nobody crashes, nobody waits, everybody is told.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include "test/check.h"
#include "test/cluster.h"
#include "test/world.h"

namespace {

std::atomic<size_t> most_bytes{SIZE_MAX};
std::atomic<bool> no_scratch{false};     // only the engine's scratch is asked for quietly
std::atomic<int64_t> n_left{INT64_MAX};  // allocations until one fails

bool fails(size_t n_bytes) {
  if (n_bytes > most_bytes) return true;
  return n_left != INT64_MAX && n_left.fetch_sub(1) == 1;
}

}  // namespace

// GCC takes a pair that is inlined on one side only for a mismatch.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

void* operator new(size_t n_bytes) {
  void* const memory = fails(n_bytes) ? nullptr : std::malloc(n_bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new[](size_t n_bytes) { return operator new(n_bytes); }
void* operator new(size_t n_bytes, const std::nothrow_t&) noexcept {
  return no_scratch || fails(n_bytes) ? nullptr : std::malloc(n_bytes);
}
void* operator new[](size_t n_bytes, const std::nothrow_t& quietly) noexcept {
  return operator new(n_bytes, quietly);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

namespace shoal::test {
namespace {

// An all-reduce of 1 MiB while no more than 32 KiB can be had at a time.
void check_all_are_told(Kind kind, int per_host, const std::string& why) {
  Cluster cluster(2, per_host);
  Job job;
  job.kind = kind;
  job.n_elems = 256u << 10;
  job.segment_bytes = 128u << 10;
  const auto on_0 = cluster.post(0, job);
  auto memory = input_of(job, 1, 2);
  const auto plan = plan_of(job, 1, 2);
  most_bytes = 32u << 10;
  const auto on_1 = cluster.meshes[1]->post(*cluster.groups[1], plan, job.key, {{memory.data()}},
                                            kPatience, false);
  CHECK(!cluster.wait(0, *on_0));
  CHECK(eventually([&] { return cluster.meshes[1]->wait(*on_1, kSecond); }));
  most_bytes = SIZE_MAX;
  for (const Collective* call : {on_0->call.get(), on_1.get()}) {
    CHECK(call->error.fault == Fault::kResource);
    CHECK(call->error.text.find(why) != std::string::npos);
  }
}

// One allocation fails, the `nth` from now on: what is in flight ends, at the latest at its
// deadline.
void check_calls_end(Kind kind, int per_host, bool aborts, int64_t nth, int n_channels = 1) {
  Cluster cluster(2, per_host, 0, 1, 0, n_channels);
  Job job;
  job.kind = kind;
  job.n_elems = 40'000;
  job.segment_bytes = 32u << 10;
  Bytes memory[] = {input_of(job, 0, 2), input_of(job, 1, 2)};
  const std::shared_ptr<const Plan> plans[] = {cluster.cut(plan_of(job, 0, 2)),
                                               cluster.cut(plan_of(job, 1, 2))};
  std::shared_ptr<Collective> calls[2];
  n_left = nth;
  for (const int rank : {0, 1}) {
    Mesh& mesh = *cluster.meshes[static_cast<size_t>(rank)];
    Group& group = *cluster.groups[static_cast<size_t>(rank)];
    try {
      calls[rank] = mesh.post(group, plans[rank], 1, {{memory[rank].data()}}, kSecond, true);
      if (rank == 0 && aborts) mesh.abort_group(group, "enough");
    } catch (const std::bad_alloc&) {  // it was not made
    }
  }
  for (const auto& call : calls)
    CHECK(call == nullptr || eventually([&] { return call->is_over(); }));
  n_left = INT64_MAX;
}

TEST("whichever allocation fails, every call ends and nobody crashes") {
  int64_t first = 1;  // another one in each case: all of them would take a minute
  for (const Kind kind : {Kind::kDirectAllReduce, Kind::kRingAllReduce})
    for (const int per_host : {1, 2})
      for (const bool aborts : {false, true})
        for (int64_t nth = first++; nth < 60; nth += 8)
          check_calls_end(kind, per_host, aborts, nth);
}

TEST("whichever allocation fails, every call that is cut over channels ends as well") {
  int64_t first = 1;
  for (const Kind kind : {Kind::kDirectAllReduce, Kind::kRingAllReduce})
    for (const bool aborts : {false, true})
      for (int64_t nth = first++; nth < 100; nth += 8) check_calls_end(kind, 1, aborts, nth, 2);
}

TEST("whichever allocation fails as a group's end is told, every channel hears of it in the end") {
  for (int64_t nth = 1; nth < 12; ++nth) {
    FirstErrors errors(3);
    Error why{Fault::kTimedOut, 1, std::string(100, 'x')};
    n_left = nth;
    try {
      errors.tell(0, 7, true, why, 1);
    } catch (const std::bad_alloc&) {  // the channel ends its groups once more then
      n_left = INT64_MAX;
      errors.tell(0, 7, true, why, 1);
    }
    n_left = INT64_MAX;
    for (const int channel : {1, 2}) {
      CHECK(errors.has_news(channel));
      CHECK_EQ(errors.take(channel, 1).size(), 1u);
    }
  }
}

TEST("want of memory for what arrives ends the groups in words, whichever thread it befalls") {
  check_all_are_told(Kind::kShardedAllReduce, 1, "ran out of memory");
}

TEST("want of memory for a call's scratch ends its group in words") {
  check_all_are_told(Kind::kDirectAllReduce, 2, "B of memory left for all_reduce");
}

TEST("a call that ends well stays so where there is no scratch left for the next of its group") {
  World::Options options;
  options.idles = 0;
  options.engine.staging_bytes = 64u << 10;  // one call's scratch at a time, beyond the ceiling
  World world(3, options);
  Job job;
  job.kind = Kind::kDirectAllReduce;
  job.n_elems = 64u << 10;
  job.segment_bytes = 16u << 10;
  std::vector<Call*> calls;
  for (job.key = 0; job.key < 4; ++job.key)
    for (const int rank : {0, 1, 2}) calls.push_back(&world.post(rank, job));
  const auto has_scratch = [&](int rank) { return world.engine(rank).scratch_bytes() > 0; };
  CHECK(world.run([&] { return has_scratch(0) && has_scratch(1) && has_scratch(2); }));
  no_scratch = true;
  CHECK(world.run_all(60'000));
  no_scratch = false;
  CHECK(calls[0]->ok() || calls[1]->ok() || calls[2]->ok());  // the first to end
  CHECK(std::any_of(calls.begin(), calls.end(), [](const Call* call) { return !call->ok(); }));
  for (const int rank : {0, 1, 2}) CHECK_EQ(world.engine(rank).n_in_flight(), 0);
}

}  // namespace
}  // namespace shoal::test
