// The memory of finished calls.
#include <cstdlib>
#include <memory>
#include <new>

#include "engine/segments/finished_calls.h"
#include "test/check.h"

namespace {

int n_blocks = 0;  // allocated and not freed

}  // namespace

// GCC reports a mismatch if the pair is inlined on one side only.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"

void* operator new(size_t n_bytes) {
  void* const memory = std::malloc(n_bytes);
  if (memory == nullptr) throw std::bad_alloc();
  ++n_blocks;
  return memory;
}
void* operator new(size_t n_bytes, std::align_val_t) { return operator new(n_bytes); }
void operator delete(void* memory) noexcept {
  n_blocks -= memory != nullptr;
  std::free(memory);
}
void operator delete(void* memory, size_t) noexcept { operator delete(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { operator delete(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { operator delete(memory); }

namespace shoal::test {
namespace {

TEST("the last 4096 calls are remembered in few blocks of memory") {
  const auto plan = std::make_shared<Plan>();
  const int before = n_blocks;
  FinishedCalls finished;
  for (uint64_t key = 1; key <= 10'000; ++key) finished.remember(key, plan);
  CHECK(n_blocks - before < 100);
  CHECK_EQ(finished.keys().size(), FinishedCalls::kKept);
  CHECK(finished.past(10'000 - FinishedCalls::kKept).plan == nullptr);
  for (uint64_t key = 10'001 - FinishedCalls::kKept; key <= 10'000; ++key)
    CHECK(finished.past(key).plan == plan);
}

}  // namespace
}  // namespace shoal::test
