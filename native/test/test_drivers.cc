// A caller that waits for a call sleeps until it is rung, and never while there is work.
#include <optional>
#include <utility>

#include "base/clock.h"
#include "engine/shell/drivers.h"
#include "test/check.h"
#include "test/pool.h"

namespace shoal::test {
namespace {

constexpr int64_t kLong = 60 * kSecond;

// A thread that ends the last lane of a call counts it and then rings, under another channel's
// lock: even between any two looks of the waiting caller. The caller looks before a step, after it,
// and once more after it has marked itself asleep.
TEST("a call that ends while its caller falls asleep is noticed without a timer") {
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

TEST("a caller that is never rung wakes at its deadline and leaves nobody marked asleep") {
  Engine engine(0, {"rank 0", "rank 1"}, {});
  auto arena = std::make_shared<Arena>();
  CHECK(!Arena::create(1, *arena));
  Drivers drivers(engine, arena, {0, kLong}, 1, [] { return false; });
  std::mutex mutex;
  std::unique_lock lock(mutex);
  CHECK(!drivers.drive(lock, kMillisecond, nullptr, [] { return false; }));
  CHECK_EQ(arena->header().watch.load(), 0u);
}

TEST("the progress thread does not sleep on an alarm that a caller has left") {
  Engine engine(0, {"rank 0", "rank 1"}, {});
  auto arena = std::make_shared<Arena>();
  CHECK(!Arena::create(1, *arena));
  Drivers drivers(engine, arena, {0, kLong}, 1, [] { return false; });
  arena->header().alarm.store(1);
  CHECK(!drivers.may_thread_sleep());
  CHECK(drivers.call_for_thread(now_ns()));
  CHECK(drivers.may_thread_sleep());
}

TEST("a caller that leaves while a reported failure waits hands it to the progress thread") {
  Engine engine(0, {"rank 0", "rank 1"}, {});
  engine.add_group(7, {0, 1});
  auto arena = std::make_shared<Arena>();
  CHECK(!Arena::create(1, *arena));
  Drivers drivers(engine, arena, {0, kLong}, 1, [] { return false; });
  Header abort;
  abort.type = FrameType::kAbort;
  abort.group = 7;
  engine.arrived(1, abort, {});
  std::mutex mutex;
  std::unique_lock lock(mutex);
  CHECK(drivers.drive(lock, kLong, nullptr, [] { return true; }));
}

// A server's engine, and the drivers of a channel around it.
struct Serving {
  explicit Serving(int n_local) {
    CHECK(!Arena::create(n_local, *arena));
    Group& group = engine.add_group(7, {0, 1, 2});
    engine.serve(group, plan_of(PoolJob{2, 1}, 2), 0);
    drivers.emplace(engine, arena, Drivers::Options{0, kLong}, n_local, [this] {
      ++n_steps;
      return false;
    });
  }

  Engine engine{2, {"rank 0", "rank 1", "rank 2"}, {}};
  std::shared_ptr<Arena> arena = std::make_shared<Arena>();
  int n_steps = 0;
  std::optional<Drivers> drivers;
};

TEST("a caller on a server moves no data, and notices at once a call that ends before it sleeps") {
  for (int ends_after = 1; ends_after <= 2; ++ends_after) {
    Serving serving(1);
    CHECK(serving.drivers->leave_it_to_thread());
    std::mutex mutex;
    std::unique_lock lock(mutex);
    int n_looks = 0;
    bool is_over = false;
    serving.drivers->await(lock, kLong, [&] {
      const bool was_over = is_over;
      if (++n_looks == ends_after) {
        is_over = true;
        serving.drivers->ring();
      }
      return was_over;
    });
    CHECK(is_over);
    CHECK_EQ(serving.n_steps, 0);
    CHECK_EQ(serving.drivers->n_callers(), 0);
    CHECK_EQ(serving.arena->header().watch.load(), 0u);
  }
}

TEST("a caller on a server is rung for calls that end, not for pending work") {
  Serving serving(1);
  std::mutex mutex;
  std::unique_lock lock(mutex);
  int n_looks = 0;
  serving.drivers->await(lock, kLong, [&] {
    if (++n_looks == 2) {  // it has marked itself asleep
      CHECK(!serving.drivers->are_to_be_rung());
      serving.drivers->note_end();
      CHECK(serving.drivers->are_to_be_rung());
    }
    return n_looks >= 2;
  });
  CHECK(!serving.drivers->are_to_be_rung());
}

TEST("a caller that drives keeps the mark of another that sleeps on the server") {
  Serving serving(1);
  std::mutex mutex;
  std::unique_lock lock(mutex);
  int n_looks = 0;
  serving.drivers->await(lock, kLong, [&] {
    if (++n_looks == 2) {  // it has marked itself asleep
      serving.drivers->drive(lock, kLong, nullptr, [] { return true; });
      CHECK_EQ(serving.arena->header().watch.load(), kCallerSleeps);
    }
    return n_looks >= 2;
  });
  CHECK_EQ(serving.arena->header().watch.load(), 0u);
}

TEST("on a server with host-mates, whose rings only callers poll, callers help") {
  CHECK(!Serving(2).drivers->leave_it_to_thread());
}

}  // namespace
}  // namespace shoal::test
