// Large allocations fail from a moment on: nobody crashes, nobody waits, everybody is told.
#include <atomic>
#include <cstdlib>
#include <new>

#include "test/check.h"
#include "test/cluster.h"

namespace {

std::atomic<size_t> most_bytes{SIZE_MAX};

}  // namespace

// GCC takes a pair that is inlined on one side only for a mismatch.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

void* operator new(size_t n_bytes) {
  void* const memory = n_bytes > most_bytes ? nullptr : std::malloc(n_bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new[](size_t n_bytes) { return operator new(n_bytes); }
void* operator new(size_t n_bytes, const std::nothrow_t&) noexcept {
  return n_bytes > most_bytes ? nullptr : std::malloc(n_bytes);
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

TEST("want of memory for what arrives ends the groups in words, whichever thread it befalls") {
  check_all_are_told(Kind::kShardedAllReduce, 1, "ran out of memory");
}

TEST("want of memory for a call's scratch ends its group in words") {
  check_all_are_told(Kind::kDirectAllReduce, 2, "B of memory left for all_reduce");
}

}  // namespace
}  // namespace shoal::test
