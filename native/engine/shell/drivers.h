// Who drives a channel: callers in wait(), awake or asleep, and its progress thread while there are
// none. docs/threads.md tells why no wake-up is lost.
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
    // How long nobody who sleeps looks for work by itself. Only what was lost can be found so:
    // whoever brings work wakes somebody, and `Wakeups::late` counts what this found.
    int64_t backstop_ns = 100'000'000;
  };
  // Why the sleepers of this process woke, ever. For people and tests.
  struct Wakeups {
    std::atomic<uint64_t> callers_rung{0};   // by a peer, or by another thread of this process
    std::atomic<uint64_t> callers_timed{0};  // to look at signals, deadlines, and for lost work
    std::atomic<uint64_t> thread_rung{0};
    std::atomic<uint64_t> late{0};  // found work that nobody had announced
  };
  static Wakeups& wakeups();

  // `step`: moves the channel forward; true if anything moved or can move now. `n_local`: ranks of
  // this host.
  Drivers(Engine& engine, std::shared_ptr<Arena> arena, const Options& options, int n_local,
          std::function<bool()> step);

  Rings& rings() { return rings_; }

  // ---- callers

  // The life of a caller that waits, until `is_over`, the deadline, a signal, or a quiet spell.
  // `call`: the only one that it waits for; null: for any. True if work is left for the progress
  // thread.
  bool drive(std::unique_lock<std::mutex>& lock, int64_t timeout_ns, const Call* call,
             const std::function<bool()>& is_over);
  int n_callers() const { return n_callers_; }
  // Whether callers only wait: calls begin here that nobody makes, so that the progress thread is
  // busy with them, and all that comes, comes to it. Who helped would take the lock from it.
  bool leave_it_to_thread() const { return engine_.serves() && is_alone_; }
  // The life of such a caller: as drive(), and all that is left is the progress thread's.
  void await(std::unique_lock<std::mutex>& lock, int64_t timeout_ns,
             const std::function<bool()>& is_over);
  // Somebody sleeps, who from here on wakes with every frame: what it waited for is not all there
  // is.
  bool has_sleepers_for_all();
  // A call has ended: sleepers are to look at theirs.
  void note_end() { has_ended_some_ = true; }
  // Whether callers are to be rung for what was noted, or for work; what was noted is, then.
  bool are_to_be_rung();
  // Wakes all who sleep. Threads: any.
  void ring() const { arena_->wake_callers(); }

  // ---- the progress thread

  // Whether it has a reason to look for work: somebody told it of some, there is some that it knows
  // of, or it has not looked for very long.
  bool call_for_thread(int64_t now);
  // Whether it may sleep: then the doorbell is armed for it. False if something came meanwhile.
  bool may_thread_sleep();
  // Ten times a second: counts what was found that nobody had told of.
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
  int n_sleeping_ = 0;           // on the doorbell: of them, or in await()
  bool has_ended_some_ = false;  // and sleeping callers do not know yet
  // NOT at once: who has just brought the first words may still be about to ring.
  int64_t next_backstop_ns_ = now_ns() + options_.backstop_ns;
  // Work was found that the doorbell had not told of: `suspect_doorbell_` is its count then.
  // Whoever had brought the work just before is about to ring; if the doorbell has not moved at the
  // next tick, nobody was.
  bool suspects_ = false;
  uint32_t suspect_doorbell_ = 0;
};

}  // namespace shoal
