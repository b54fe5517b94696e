#include "engine/shell/drivers.h"

#include <sched.h>

#include <algorithm>
#include <utility>

namespace shoal {
namespace {

// While there is always something to do, a caller looks at signals this often.
constexpr int64_t kLookNs = 100 * kMillisecond;
// Bytes from other hosts: 200 us at 10 Gbit/s, as long as a caller polls by default.
constexpr uint64_t kSpinBytes = 256u << 10;

// The number of cores this process may use.
int usable_cores() {
  cpu_set_t cores;
  return sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
}

// Called between two polls.
void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Drivers::Drivers(Engine& engine, std::shared_ptr<Arena> arena, const Options& options, int n_local,
                 std::function<bool()> step)
    : engine_(engine),
      arena_(std::move(arena)),
      rings_(engine),
      options_(options),
      oversubscribed_(n_local > usable_cores()),
      is_alone_(n_local == 1),
      step_(std::move(step)) {}

Drivers::Wakeups& Drivers::wakeups() {
  static Wakeups counts;
  return counts;
}

// ---- callers

bool Drivers::drive(std::unique_lock<std::mutex>& lock, int64_t timeout_ns, const Call* call,
                    const std::function<bool()>& is_over) {
  int64_t now = now_ns();
  const int64_t deadline = now + timeout_ns;
  // A call that takes longer on the wire is not worth polling for.
  const bool is_long = call != nullptr && call->n_far_bytes > kSpinBytes;
  const int64_t spin_ns = is_long ? 0 : options_.spin_ns;
  int64_t spin_until = now + spin_ns;
  ArenaHeader& own = arena_->header();
  // Callers in await() may be asleep.
  const auto sleepers = [this] { return n_sleeping_ > 0 ? kCallerSleeps : 0; };
  if (n_callers_++ == 0) own.watch.store(kDriven | sleepers(), std::memory_order_release);
  const int64_t look_at = now + kLookNs;
  for (bool quiet = false; !is_over() && !quiet;) {
    const bool moved = step_();
    if (moved && std::exchange(has_ended_some_, false) && n_sleeping_ > 0) ring();
    now = now_ns();
    if (is_over() || now >= deadline || (moved && now >= look_at)) break;
    if (moved) {
      // Let another caller or the progress thread take the lock between turns.
      lock.unlock();
      lock.lock();
      spin_until = now + spin_ns;
    } else if (now < spin_until) {
      lock.unlock();
      if (!oversubscribed_)
        for (int i = 0; i < 16; ++i) relax();
      // The rank that sends the next frame may wait for this core, even if others are free: the
      // kernel tends to place a woken process beside the one that woke it.
      sched_yield();
      lock.lock();
    } else {
      quiet = !sleep_until_rung(lock, call, deadline, is_over);
      spin_until = now_ns() + spin_ns;
    }
  }
  if (--n_callers_ == 0) own.watch.exchange(sleepers());
  // Frames that arrived just now did not wake the progress thread, because a caller was driving.
  return n_callers_ == 0 && (engine_.n_in_flight() > 0 || engine_.serves() || engine_.has_work() ||
                             own.alarm.load() != 0);
}

// Sleep on the doorbell. False if it did not ring: time to look at signals and deadlines.
bool Drivers::sleep_until_rung(std::unique_lock<std::mutex>& lock, const Call* call,
                               int64_t deadline, const std::function<bool()>& is_over) {
  ArenaHeader& own = arena_->header();
  const uint32_t seen = own.doorbell.load();
  own.wake_at.store(seen + (call == nullptr ? 1 : engine_.frames_awaited(*call)));
  n_sleeping_++;
  own.watch.fetch_or(kCallerSleeps);
  // A frame that arrived between the last look and the arming has moved the doorbell, or is seen
  // here. So has the last lane of a call, which ends under the lock of another channel.
  bool came = own.doorbell.load() != seen || rings_.has_inbound() || is_over();
  if (!came) {
    const int64_t bound = std::min(deadline - now_ns(), options_.backstop_ns);
    lock.unlock();
    if (bound > 0) arena_->sleep(seen, bound);
    lock.lock();
    came = own.doorbell.load() != seen;
    (came ? wakeups().callers_rung : wakeups().callers_timed)++;
    const bool has_work = n_callers_ > 0 && (rings_.has_inbound() || engine_.has_work());
    if (!came && (has_work || has_ended_some_)) suspect();
  }
  // Only when the last one wakes: others sleep on.
  if (--n_sleeping_ == 0) own.watch.fetch_and(~kCallerSleeps);
  return came;
}

void Drivers::await(std::unique_lock<std::mutex>& lock, int64_t timeout_ns,
                    const std::function<bool()>& is_over) {
  const int64_t deadline = now_ns() + timeout_ns;
  while (!is_over() && now_ns() < deadline && sleep_until_rung(lock, nullptr, deadline, is_over)) {
  }
}

bool Drivers::has_sleepers_for_all() {
  if (n_sleeping_ == 0) return false;
  ArenaHeader& own = arena_->header();
  own.wake_at.store(own.doorbell.load());
  // A peer counts its frame before it reads `wake_at`. One that counts before this line has a frame
  // that is visible from here on; one that counts later reads the new `wake_at`.
  own.doorbell.fetch_add(0);
  return true;
}

bool Drivers::are_to_be_rung() {
  const bool has_ended_some = std::exchange(has_ended_some_, false);
  return (has_ended_some && n_callers_ + n_sleeping_ > 0) || (n_callers_ > 0 && engine_.has_work());
}

// ---- the progress thread

bool Drivers::call_for_thread(int64_t now) {
  ArenaHeader& own = arena_->header();
  const bool is_armed = (own.watch.load() & kThreadSleeps) != 0;
  if (own.alarm.load() != 0 && own.alarm.exchange(0) != 0) return true;
  if (!is_armed || engine_.has_work()) return true;
  if (now < next_backstop_ns_) return false;
  next_backstop_ns_ = now + options_.backstop_ns;
  if (engine_.n_in_flight() > 0 && rings_.has_inbound()) suspect();
  return true;
}

bool Drivers::may_thread_sleep() {
  if (n_callers_ > 0) return true;
  ArenaHeader& own = arena_->header();
  const uint32_t seen = own.doorbell.load();
  own.watch.fetch_or(kThreadSleeps);
  // Frames counted in `seen` are visible; a later one has moved the doorbell, or sees the mark. The
  // rings alone do not suffice: ARM may read them before the mark is visible. Nor does the
  // doorbell: a caller that just left with an alarm raised may have kicked this thread before it
  // slept.
  if (own.doorbell.load() == seen && own.alarm.load() == 0 && !rings_.has_inbound() &&
      !engine_.has_work())
    return true;
  own.watch.fetch_and(~kThreadSleeps);
  return false;
}

void Drivers::suspect() {
  suspects_ = true;
  suspect_doorbell_ = arena_->header().doorbell.load();
}

void Drivers::settle_suspicion() {
  if (suspects_ && arena_->header().doorbell.load() == suspect_doorbell_) wakeups().late++;
  suspects_ = false;
}

}  // namespace shoal
