// The process's end of one epoch: the engine, its links, and whoever drives them.
// docs/threads.md tells who may hold what when.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "engine/engine.h"
#include "transport/arena.h"
#include "transport/transport.h"

namespace shoal {

// Threads: any; one lock guards all state. A thread in wait() drives the mesh; the lane drives it
// when nobody waits, and always serves the sockets.
class Mesh : public std::enable_shared_from_this<Mesh> {
 public:
  struct Options {
    Engine::Options engine;
    // A waiting caller polls this long before it sleeps, where cores are free for it.
    int64_t spin_ns = 50'000;
    // How long nobody who sleeps looks for work by itself. Only what was lost can be found so:
    // whoever brings work wakes somebody, and `Wakeups::late` counts what this found.
    int64_t backstop_ns = 100'000'000;
  };
  // Why the sleepers of this process woke, ever. For people and tests.
  struct Wakeups {
    std::atomic<uint64_t> callers_rung{0};   // by a peer, or by another thread of this process
    std::atomic<uint64_t> callers_timed{0};  // to look at signals, deadlines, and for lost work
    std::atomic<uint64_t> lane_rung{0};
    std::atomic<uint64_t> late{0};  // found work that nobody had announced
  };
  static Wakeups& wakeups();

  // `job_key`: what all ranks hold and nobody else; it seals the frames between hosts.
  static Error create(int rank, std::vector<std::string> names, uint64_t epoch, Bytes job_key,
                      std::shared_ptr<Arena> arena, const std::vector<PeerSockets>& peers,
                      const Options& options, std::shared_ptr<Mesh>& out,
                      std::unique_ptr<PathMaker> paths = nullptr);
  ~Mesh();

  Group& add_group(uint64_t id, std::vector<int> members);
  void drop_group(Group& group);
  void abort_group(Group& group, const std::string& why);
  Error poison_of(Group& group);

  // `background`: nobody will wait at once, so the lane starts on it now. `notify`: next_finished()
  // will return it.
  std::shared_ptr<Collective> post(Group& group, std::shared_ptr<const Plan> plan, uint64_t key,
                                   const std::vector<std::vector<std::byte*>>& memory,
                                   int64_t timeout_ns, bool background);
  std::shared_ptr<Collective> post_message(Group& group, std::shared_ptr<const Plan> plan,
                                           bool sends, int peer, int64_t tag, std::byte* data,
                                           int64_t timeout_ns, bool background);
  // Drives until `call` is finished (true), `timeout_ns` passed, or a signal or a quiet spell gives
  // reason to look at what native code does not see.
  bool wait(Collective& call, int64_t timeout_ns);
  // Drives until the number of calls that have finished is not `seen`, or as above; that number.
  int64_t wait_finished(int64_t seen, int64_t timeout_ns);
  // Says goodbye, fails what is in flight, ends all links. Idempotent.
  void close();

  // In a forked child: this is the parent's mesh. Closes the child's descriptors without a word on
  // them. The lock may be held by a thread that the child does not have, so nothing else but
  // forsaken() may be asked of it from here on.
  void forsake();
  bool forsaken() const { return forsaken_.load(std::memory_order_relaxed); }

  // For the lane.
  static constexpr int kBell = -1, kPaths = -2;
  struct Watched {
    int fd;
    int peer;  // or kBell, kPaths
  };
  std::vector<Watched> watched();
  void on_event(int peer, bool ended);
  bool turn(int64_t now);  // true if there is more to do at once
  bool may_sleep();        // arms the bell; false if something came meanwhile
  size_t staging_peak();

  // What this rank can tell of itself (state_reader.h). Null where the lock cannot be had in that
  // time, and in a forked child: whoever asks may do so because something is stuck.
  std::shared_ptr<const Value> state(int64_t patience_ns);
  // What it could tell just before a deadline ended the group: once, null before and afterwards.
  std::shared_ptr<const Value> take_state_at_deadline(Group& group);

 private:
  Mesh(int rank, std::vector<std::string> names, const Options& options);
  std::shared_ptr<Collective> start(std::unique_lock<std::mutex>& lock,
                                    std::shared_ptr<Collective> call, bool background);
  bool step();
  template <class Work>
  void guarded(Work work);
  void out_of_memory();
  bool pump_rings();
  bool has_inbound() const;
  void serve(int peer, bool ended);
  void make_paths();
  void watch_paths(int64_t now);
  bool is_bell_link(size_t at) const { return engine_.link(bell_peers_[at]) == bell_links_[at]; }
  void wake_sleepers();
  void after_step(std::unique_lock<std::mutex>& lock);
  template <class Done>
  void drive(std::unique_lock<std::mutex>& lock, int64_t timeout_ns, const Collective* call,
             Done done);
  bool sleep_until_rung(std::unique_lock<std::mutex>& lock, const Collective* call,
                        int64_t deadline);
  bool is_called_for(int64_t now);
  void tick(int64_t now);
  void suspect();
  void settle_suspicion();
  std::shared_ptr<const Value> read_state();
  std::shared_ptr<const Value> state_at_deadline();

  const int rank_;
  const Options options_;
  std::mutex mutex_;
  std::shared_ptr<Arena> arena_;
  std::unique_ptr<PathMaker> paths_;  // null: lost paths stay lost. Outlives the links
  int64_t watch_paths_ns_ = 0;        // when to look at them again
  Engine engine_;
  std::unique_ptr<std::byte[]>
      spare_;  // given up to end everything in words when no memory is left
  // Those whose peers ring our bell, and these peers; owned by the engine while it has them.
  std::vector<Link*> bell_links_;
  std::vector<int> bell_peers_;
  std::vector<int> unread_;  // peers whose links may have something left that nobody tells of
  bool oversubscribed_ = false;
  int n_callers_ = 0;   // in drive()
  int n_sleeping_ = 0;  // of them, on the bell
  int64_t n_finished_ = 0;
  bool finished_some_ = false;  // and sleeping callers do not know yet
  bool closed_ = false;
  std::atomic<bool> forsaken_{false};
  int64_t next_tick_ns_ = 0;
  // NOT at once: who has just brought the first words may still be about to ring.
  int64_t next_backstop_ns_ = now_ns() + options_.backstop_ns;
  // Work was found that the bell had not told of: `suspect_bell_` is its count then. Whoever had
  // brought the work just before is about to ring; if the bell has not moved at the next tick,
  // nobody was.
  bool suspects_ = false;
  uint32_t suspect_bell_ = 0;
  std::weak_ptr<const Value> last_state_;  // at the last deadline
  int64_t last_state_ns_ = 0;
};

}  // namespace shoal
