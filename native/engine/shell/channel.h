// A lock, an engine, its links, and whoever drives them: the callers that wait, and a background
// thread. A mesh has one or several (mesh.h); docs/threads.md tells who may hold what when.
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

  // Which of its mesh's channels it is. All by default: the only one.
  struct Place {
    int index = 0;
    std::shared_ptr<Channel> first;       // where those sleep who wait for calls; null: it is this
    std::shared_ptr<FirstErrors> errors;  // null where there are no others
    std::shared_ptr<PathMaker> paths;     // of the mesh; null: it has no peers of other hosts
  };

  static Error create(int rank, std::vector<std::string> names, uint64_t epoch,
                      const Bytes& job_key, std::shared_ptr<Arena> arena,
                      const std::vector<PeerPlace>& peers, const Options& options, Place place,
                      std::shared_ptr<Channel>& out);
  ~Channel();

  Group& add_group(uint64_t id, std::vector<int> members);
  // The same where it is known by its number; if there is none, it is gone already.
  void drop_group(uint64_t id);
  bool has_calls(uint64_t id) {  // in flight, in this group
    std::lock_guard lock(mutex_);
    const Group* group = engine_.group(id);
    return group != nullptr && group->has_calls();
  }
  void abort_group(uint64_t id, Fault fault, const std::string& how);
  void end_group(uint64_t id, const Error& why);
  Error abort_of(const Group& group);

  // `background`: nobody will wait at once, so the progress thread starts on it now.
  std::shared_ptr<Call> post(Group& group, const Posting& posting);
  // One lane of a call, whose `serial` the first channel gives it; in the background but there.
  // Null: the group is not there any more.
  std::shared_ptr<Call> post_lane(uint64_t group, const Posting& posting,
                                  std::shared_ptr<Lanes> lanes, uint64_t serial = 0);
  std::shared_ptr<Call> post(Group& group, const Message& message);
  // See ServedCalls. Nothing, if the group is not there any more.
  void serve(uint64_t group, std::shared_ptr<const Plan> plan);
  void bound_out(size_t n_bytes) {
    std::lock_guard lock(mutex_);
    engine_.bound_out(n_bytes);
  }
  // Drives until `call` is over, all of it (true), `timeout_ns` passed, or a signal or a quiet
  // spell gives reason to look at what native code does not see.
  bool wait(Call& call, int64_t timeout_ns);
  // Drives until the number of calls that have finished is not `seen`, or as above; that number.
  int64_t wait_finished(int64_t seen, int64_t timeout_ns);
  // The end, step by step; all channels of a mesh take each together. Idempotent.
  void say_goodbye();
  bool owes_data();     // to somebody who lives; moves it
  bool has_queued();    // it has yet to leave; moves it
  void end_calls();     // what is in flight fails, and all that comes
  bool lingers();       // some peer may not have read the goodbye
  void end_links();     // wakes those who wait for calls
  void leave_thread();  // none wakes the progress thread of another any more

  // In a forked child: this is the parent's mesh. Closes the child's descriptors without a word on
  // them. The lock may be held by a thread that the child does not have, so nothing else but
  // forsaken() may be asked of it from here on.
  void forsake();
  bool forsaken() const { return forsaken_.load(std::memory_order_relaxed); }

  // For the progress thread.
  static constexpr int kDoorbell = -1, kPaths = -2;
  std::vector<Watched> watched();
  void on_event(int peer, bool ended);
  bool turn(int64_t now);  // true if there is more to do at once
  bool may_sleep();        // arms the doorbell; false if something came meanwhile
  size_t staging_peak();

  // What this rank can tell of itself (state_reader.h). Null where the lock cannot be had in that
  // time, and in a forked child: whoever asks may do so because something is stuck.
  std::shared_ptr<const Value> state(int64_t patience_ns);
  // What it could tell just before a deadline ended the group: once, null before and afterwards.
  // `group`: one of this channel, which may have been dropped.
  std::shared_ptr<const Value> take_state_at_deadline(uint64_t id, Group* group = nullptr);

 private:
  Channel(int rank, std::vector<std::string> names, std::shared_ptr<Arena> arena, int n_local,
          const Options& options, Place place);
  Error connect_all(const Site& site, const std::vector<PeerPlace>& peers);
  void serve_slots(int n_local);
  ProgressThread& progress_thread() const { return ProgressThread::of(place_.index); }
  void ended(Call& call);
  void count_finished();
  void tell_others(Group& group, Error& why, bool heard);
  void hear_others(int64_t now);
  std::shared_ptr<Call> start(std::unique_lock<std::mutex>& lock, std::shared_ptr<Call> call,
                              bool background);
  bool step();
  template <class Work>
  void guarded(Work work);
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
  const Place place_;  // its paths outlive the links
  std::mutex mutex_;
  std::shared_ptr<Arena> arena_;
  Engine engine_;
  Drivers drivers_;
  ServedLinks served_;
  std::unique_ptr<std::byte[]>
      spare_;  // given up to end everything in words when no memory is left
  // Calls; of those that are cut, the first channel counts the whole.
  std::atomic<int64_t> n_finished_{0};
  bool closed_ = false;
  bool is_dropping_ = false;  // a group ends here for no fault: the others are told by who drops it
  std::atomic<bool> forsaken_{false};
  int64_t next_tick_ns_ = 0;
  std::weak_ptr<const Value> last_state_;  // at the last deadline
  int64_t last_state_ns_ = 0;
};

}  // namespace shoal
