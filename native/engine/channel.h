// A lock, an engine, its links, and whoever drives them: the callers that wait, and a background
// thread. A mesh has one or several (mesh.h); docs/threads.md tells who may hold what when.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/clock.h"
#include "engine/engine.h"
#include "engine/first_errors.h"
#include "engine/lane.h"
#include "transport/arena.h"
#include "transport/path_maker.h"
#include "transport/transport.h"

namespace shoal {

// Threads: any; one lock guards all state. A thread in wait() drives the channel; its lane drives
// it when nobody waits, and always serves the sockets.
class Channel : public std::enable_shared_from_this<Channel> {
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

  // Which of its mesh's channels it is. All by default: the only one.
  struct Place {
    int index = 0;
    std::shared_ptr<Channel> first;       // where those sleep who wait for calls; null: it is this
    std::shared_ptr<FirstErrors> errors;  // null where there are no others
    std::shared_ptr<PathMaker> paths;     // of the mesh; null: lost paths stay lost
  };

  static Error create(int rank, std::vector<std::string> names, uint64_t epoch,
                      const Bytes& job_key, std::shared_ptr<Arena> arena,
                      const std::vector<PeerSockets>& peers, const Options& options, Place place,
                      std::shared_ptr<Channel>& out);
  ~Channel();

  Group& add_group(uint64_t id, std::vector<int> members);
  // The same where it is known by its number; if there is none, it is gone already.
  void drop_group(uint64_t id);
  void abort_group(uint64_t id, const std::string& why);
  void end_group(uint64_t id, const Error& why);
  Error poison_of(const Group& group);

  // `background`: nobody will wait at once, so the lane starts on it now.
  std::shared_ptr<Collective> post(Group& group, std::shared_ptr<const Plan> plan, uint64_t key,
                                   const std::vector<std::vector<std::byte*>>& memory,
                                   int64_t timeout_ns, bool background);
  // One stripe of a call, whose `serial` the first channel gives it; in the background but there.
  // Null: the group is not there any more.
  std::shared_ptr<Collective> post_stripe(uint64_t group, std::shared_ptr<const Plan> plan,
                                          uint64_t key,
                                          const std::vector<std::vector<std::byte*>>& memory,
                                          int64_t timeout_ns, bool background,
                                          std::shared_ptr<Stripes> stripes, uint64_t serial = 0);
  std::shared_ptr<Collective> post_message(Group& group, std::shared_ptr<const Plan> plan,
                                           bool sends, int peer, int64_t tag, std::byte* data,
                                           int64_t timeout_ns, bool background);
  // Drives until `call` is over, all of it (true), `timeout_ns` passed, or a signal or a quiet
  // spell gives reason to look at what native code does not see.
  bool wait(Collective& call, int64_t timeout_ns);
  // Drives until the number of calls that have finished is not `seen`, or as above; that number.
  int64_t wait_finished(int64_t seen, int64_t timeout_ns);
  // Says goodbye, fails what is in flight, ends all links. Idempotent.
  void close();
  // After close(), of all channels: none wakes the lane of another then.
  void leave_lane();

  // In a forked child: this is the parent's mesh. Closes the child's descriptors without a word on
  // them. The lock may be held by a thread that the child does not have, so nothing else but
  // forsaken() may be asked of it from here on.
  void forsake();
  bool forsaken() const { return forsaken_.load(std::memory_order_relaxed); }

  // For the lane.
  static constexpr int kBell = -1, kPaths = -2;
  std::vector<Watched> watched();
  void on_event(int peer, bool ended);
  bool turn(int64_t now);  // true if there is more to do at once
  bool may_sleep();        // arms the bell; false if something came meanwhile
  size_t staging_peak();

  // What this rank can tell of itself (state_reader.h). Null where the lock cannot be had in that
  // time, and in a forked child: whoever asks may do so because something is stuck.
  std::shared_ptr<const Value> state(int64_t patience_ns);
  // What it could tell just before a deadline ended the group: once, null before and afterwards.
  // `group`: one of this channel, which may have been dropped.
  std::shared_ptr<const Value> take_state_at_deadline(uint64_t id, Group* group = nullptr);

 private:
  Channel(int rank, std::vector<std::string> names, const Options& options, Place place);
  Lane& lane() const { return Lane::of(place_.index); }
  void ended(Collective& call);
  void count_finished();
  void tell_others(Group& group, Error& why, bool heard);
  void hear_others(int64_t now);
  void end_late(int64_t now);
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
  void take_paths();
  void watch_paths(int64_t now);
  bool is_bell_link(size_t at) const { return engine_.link(bell_peers_[at]) == bell_links_[at]; }
  void wake_sleepers();
  void after_step(std::unique_lock<std::mutex>& lock);
  template <class Done>
  void drive(std::unique_lock<std::mutex>& lock, int64_t timeout_ns, const Collective* call,
             Done done);
  template <class Done>
  bool sleep_until_rung(std::unique_lock<std::mutex>& lock, const Collective* call,
                        int64_t deadline, Done done);
  bool is_called_for(int64_t now);
  void tick(int64_t now);
  void suspect();
  void settle_suspicion();
  std::shared_ptr<const Value> read_state();
  std::shared_ptr<const Value> state_at_deadline();

  const int rank_;
  const Options options_;
  const Place place_;           // its paths outlive the links
  int64_t watch_paths_ns_ = 0;  // when to look at them again
  std::mutex mutex_;
  std::shared_ptr<Arena> arena_;
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
  // Calls; of those that are cut, the first channel counts the whole.
  std::atomic<int64_t> n_finished_{0};
  bool finished_some_ = false;  // and sleeping callers do not know yet
  bool closed_ = false;
  bool is_dropping_ = false;  // a group ends here for no fault: the others are told by who drops it
  struct LateEnd {
    uint64_t group;
    Error why;
    int64_t at_ns;
  };
  std::vector<LateEnd> late_ends_;  // of groups that other channels hear have ended
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
