// The threads that drive a channel: callers in wait(), and the progress thread while there are
// none. docs/threads.md explains why no wake-up is lost.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "base/clock.h"
#include "engine/shell/engine.h"
#include "engine/shell/rings.h"
#include "transport/arena.h"

namespace shoal {

// Threads: under the channel's lock, except ring().
class Drivers {
 public:
  struct Options {
    // A waiting caller polls this long before it sleeps, where cores are free for it; where ranks
    // outnumber cores it yields meanwhile. Longer burns CPU in long waits. It must outlast a
    // wake-up (60 us on a virtual machine): else two ranks that once fell asleep wake each other
    // for ever, 65 instead of 3 us a message (bench/LOG.md).
    int64_t spin_ns = 200'000;
    // How long a sleeper waits before it looks for work without a wake-up. Every thread that brings
    // work wakes a sleeper, so this finds only lost wake-ups, which `Wakeups::late` counts.
    int64_t backstop_ns = 100'000'000;
  };
  // How often sleepers of this process woke, by reason. For people and tests.
  struct Wakeups {
    std::atomic<uint64_t> callers_rung{0};   // by a peer, or by another thread of this process
    std::atomic<uint64_t> callers_timed{0};  // to check signals, deadlines and for lost work
    std::atomic<uint64_t> thread_rung{0};
    std::atomic<uint64_t> late{0};  // found work without a wake-up
  };
  static Wakeups& wakeups();

  // `step`: advances the channel; true if anything moved or can move now. `n_local`: the number of
  // ranks on this host.
  Drivers(Engine& engine, std::shared_ptr<Arena> arena, const Options& options, int n_local,
          std::function<bool()> step);

  Rings& rings() { return rings_; }

  // ---- callers

  // Drive until `is_over`, the deadline, a signal or a quiet spell. `call`: the only call that the
  // caller waits for; null: any. True if work is left for the progress thread.
  bool drive(std::unique_lock<std::mutex>& lock, int64_t timeout_ns, const Call* call,
             const std::function<bool()>& is_over);
  int n_callers() const { return n_callers_; }
  // True if callers only sleep: this rank serves calls, which keep the progress thread busy, and a
  // caller that drove too would only compete for the lock.
  bool leave_it_to_thread() const { return engine_.serves() && is_alone_; }
  // As drive(), for such a caller: it leaves all work to the progress thread.
  void await(std::unique_lock<std::mutex>& lock, int64_t timeout_ns,
             const std::function<bool()>& is_over);
  // True if a caller sleeps. From here on every frame wakes it, because other calls need driving
  // too.
  bool has_sleepers_for_all();
  // Note that a call has ended, so that sleeping callers look at theirs.
  void note_end() { has_ended_some_ = true; }
  // True if sleeping callers must be woken for an ended call or for work. Clears the note.
  bool are_to_be_rung();
  // Wake every sleeping caller. Threads: any.
  void ring() const { arena_->wake_callers(); }

  // ---- the progress thread

  // True if the thread must look for work: it was woken, work is known, or the backstop is due.
  bool call_for_thread(int64_t now);
  // Arm the doorbell for the thread; false if work arrived meanwhile, so that it must not sleep.
  bool may_thread_sleep();
  // Called ten times a second: count work that was found without a wake-up.
  void settle_suspicion();

 private:
  bool sleep_until_rung(std::unique_lock<std::mutex>& lock, const Call* call, int64_t deadline,
                        const std::function<bool()>& is_over);
  void suspect();

  Engine& engine_;
  const std::shared_ptr<Arena> arena_;
  Rings rings_;
  const Options options_;
  const bool oversubscribed_, is_alone_;  // on its host
  const std::function<bool()> step_;
  int n_callers_ = 0;            // in drive()
  int n_sleeping_ = 0;           // callers asleep on the doorbell, in drive() or await()
  bool has_ended_some_ = false;  // a call has ended since sleepers were last woken
  // Do not start in the past: the peer that sent the first frame may still be about to ring.
  int64_t next_backstop_ns_ = now_ns() + options_.backstop_ns;
  // Work was found that no ring had announced, at doorbell count `suspect_doorbell_`. A peer that
  // has just written is about to ring; if the count is the same at the next tick, the wake-up was
  // lost.
  bool suspects_ = false;
  uint32_t suspect_doorbell_ = 0;
};

}  // namespace shoal
