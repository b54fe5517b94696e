// A caller that waits for a call sleeps until it is rung, and never on what is there already.
#include "base/clock.h"
#include "engine/drivers.h"
#include "test/check.h"

namespace shoal::test {
namespace {

constexpr int64_t kLong = 60 * kSecond;

// Whoever ends the last stripe of a call counts it and then rings, under another channel's lock:
// also between any two looks of the caller that waits. It looks before a step, after it, and, when
// it has marked itself asleep, once more.
TEST("what ends between any two looks of a caller that goes to sleep is found without a timer") {
  for (int ends_after = 1; ends_after <= 3; ++ends_after) {
    Engine engine(0, {"rank 0", "rank 1"}, {});
    auto arena = std::make_shared<Arena>();
    CHECK(!Arena::create(1, *arena));
    Drivers drivers(engine, arena, {0, kLong}, 1, [] { return false; });
    std::mutex mutex;
    std::unique_lock lock(mutex);
    int n_looks = 0;
    bool is_over = false;
    drivers.drive(lock, kLong, nullptr, [&] {
      const bool was_over = is_over;
      if (++n_looks == ends_after) {
        is_over = true;
        drivers.ring();
      }
      return was_over;
    });
    CHECK(is_over);
    CHECK_EQ(drivers.n_callers(), 0);
    CHECK_EQ(arena->header().watch.load(), 0u);
  }
  CHECK_EQ(Drivers::wakeups().callers_timed.load(), 0u);
}

TEST("a caller that nothing rings comes back for its deadline, and leaves nobody marked asleep") {
  Engine engine(0, {"rank 0", "rank 1"}, {});
  auto arena = std::make_shared<Arena>();
  CHECK(!Arena::create(1, *arena));
  Drivers drivers(engine, arena, {0, kLong}, 1, [] { return false; });
  std::mutex mutex;
  std::unique_lock lock(mutex);
  CHECK(!drivers.drive(lock, kMillisecond, nullptr, [] { return false; }));
  CHECK_EQ(arena->header().watch.load(), 0u);
}

}  // namespace
}  // namespace shoal::test
