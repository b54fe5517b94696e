// A channel: a lock, an engine and its links, driven by the callers that wait or by a background
// thread. A mesh has one or several (mesh.h). docs/threads.md says which thread may hold which
// lock.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/life/first_errors.h"
#include "engine/shell/drivers.h"
#include "engine/shell/engine.h"
#include "engine/shell/progress_thread.h"
#include "engine/shell/served_links.h"
#include "transport/arena.h"
#include "transport/path_maker.h"
#include "transport/transport.h"

namespace shoal {

// Threads: any; one lock guards all state. A thread in wait() drives the channel; its progress
// thread drives it when nobody waits, and always serves the sockets.
class Channel : public std::enable_shared_from_this<Channel> {
 public:
  struct Options : Drivers::Options {
    Engine::Options engine;
  };

  // The channel's place in its mesh. The defaults are those of an only channel.
  struct Place {
    int index = 0;
    std::shared_ptr<Channel> first;       // where callers sleep; null: this channel
    std::shared_ptr<FirstErrors> errors;  // null if there is one channel
    std::shared_ptr<PathMaker> paths;     // the mesh's; null if no peer is on another host
  };

  static Error create(int rank, std::vector<std::string> names, uint64_t epoch,
                      const Bytes& job_key, std::shared_ptr<Arena> arena,
                      const std::vector<PeerPlace>& peers, const Options& options, Place place,
                      std::shared_ptr<Channel>& out);
  ~Channel();

  Group& add_group(uint64_t id, std::vector<int> members);
  // Drop a group by its number; does nothing if it was dropped before.
  void drop_group(uint64_t id);
  bool has_calls(uint64_t id) {  // in flight
    std::lock_guard lock(mutex_);
    const Group* group = engine_.group(id);
    return group != nullptr && group->has_calls();
  }
  void abort_group(uint64_t id, Fault fault, const std::string& how);
  void end_group(uint64_t id, const Error& why);
  Error abort_of(const Group& group);

  // Posting::background: no caller waits yet, so the progress thread starts the call.
  std::shared_ptr<Call> post(Group& group, const Posting& posting);
  // Post one lane of a call. The first channel assigns `serial`; on all others the lane runs in the
  // background. Null if the group was dropped.
  std::shared_ptr<Call> post_lane(uint64_t group, const Posting& posting,
                                  std::shared_ptr<Lanes> lanes, uint64_t serial = 0);
  std::shared_ptr<Call> post(Group& group, const Message& message);
  // Rings this eventfd at once, and from now on for each frame of a message whose receive is not
  // posted, and when the group ends. False if the process has no descriptor left.
  bool notify(uint64_t group, int fd);
  // True if the next message of this tag from this rank of the group has arrived, or a part of it.
  bool has_message(uint64_t group, int from, int64_t tag);
  // See ServedCalls. Does nothing if the group was dropped.
  void serve(uint64_t group, std::shared_ptr<const Plan> plan);
  void bound_out(size_t n_bytes) {
    std::lock_guard lock(mutex_);
    engine_.bound_out(n_bytes);
  }
  // Drive until every lane of `call` is over (true), `timeout_ns` has passed, or a signal or a
  // quiet spell requires the caller to look at what only Python can see.
  bool wait(Call& call, int64_t timeout_ns);
  // Drive until the number of finished calls differs from `seen`, or as above. Returns that number.
  int64_t wait_finished(int64_t seen, int64_t timeout_ns);
  // The steps of closing, each taken by all channels of a mesh before the next. Idempotent.
  void say_goodbye();
  bool owes_data();     // a living peer lacks data; sends more of it
  bool has_queued();    // the goodbye has yet to leave; sends more of it
  void end_calls();     // fail the calls in flight and all later ones
  bool lingers();       // some peer may not have read the goodbye
  void end_links();     // also wakes the callers that wait
  void leave_thread();  // from here on no channel wakes another's progress thread

  // In a forked child, close the child's copies of the parent's descriptors without sending on
  // them. A thread that the child lacks may hold the lock, so only forsaken() may be called from
  // here on.
  void forsake();
  bool forsaken() const { return forsaken_.load(std::memory_order_relaxed); }

  // Called by the progress thread:
  static constexpr int kDoorbell = -1, kPaths = -2;
  std::vector<Watched> watched();
  void on_event(int peer, bool ended);
  bool turn(int64_t now);  // true if there is more to do at once
  bool may_sleep();        // arms the doorbell; false if something arrived meanwhile
  size_t staging_peak();

  // This rank's state (state_reader.h). Null if the lock cannot be taken within `patience_ns`,
  // since a thread may be stuck with it, and in a forked child.
  std::shared_ptr<const Value> state(int64_t patience_ns);
  // The state just before a deadline ended the group. Handed out once; null before and afterwards.
  // `group`: of this channel; it may have been dropped.
  std::shared_ptr<const Value> take_state_at_deadline(uint64_t id, Group* group = nullptr);

 private:
  Channel(int rank, std::vector<std::string> names, std::shared_ptr<Arena> arena, int n_local,
          const Options& options, Place place);
  Error connect_all(const Site& site, const std::vector<PeerPlace>& peers);
  void serve_slots(int n_local);
  ProgressThread& progress_thread() const { return ProgressThread::of(place_.index); }
  void ended(Call& call);
  void count_finished();
  void notify_others(Group& group, Error& why, bool reported);
  void take_errors(int64_t now);
  std::shared_ptr<Call> start(std::unique_lock<std::mutex>& lock, std::shared_ptr<Call> call,
                              bool background);
  bool step();
  template <class Work>
  void guarded(Work work);
  void end_groups();  // because the channel was closed
  void out_of_memory();
  bool pumps_while(bool (Engine::*holds)() const);
  void drive(int64_t timeout_ns, const Call* call, const std::function<bool()>& is_over);
  void make_paths();
  void take_paths();
  void after_step(std::unique_lock<std::mutex>& lock);
  void tick(int64_t now);
  std::shared_ptr<const Value> read_state();
  std::shared_ptr<const Value> state_at_deadline();

  const int rank_;
  const Place place_;  // keeps the paths alive longer than the links
  std::mutex mutex_;
  std::shared_ptr<Arena> arena_;
  Engine engine_;
  Drivers drivers_;
  ServedLinks served_;
  std::unique_ptr<std::byte[]>
      spare_;  // freed when memory runs out, so that groups can end with an error that says so
  // Finished calls; the first channel counts those that are cut into lanes.
  std::atomic<int64_t> n_finished_{0};
  bool closed_ = false;
  bool is_dropping_ = false;  // a group ends without a fault: its owner notifies the other channels
  std::atomic<bool> forsaken_{false};
  int64_t next_tick_ns_ = 0;
  std::weak_ptr<const Value> last_state_;  // at the last deadline
  int64_t last_state_ns_ = 0;
};

}  // namespace shoal
