// The process's end of one epoch: its channels, and what is rare: groups, faults, the end.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "engine/shell/channel.h"

namespace shoal {

// The first channel has the links inside the host, and every call that is not cut. The others have
// links to other hosts alone, and carry lanes of large calls (docs/decisions/0016-channels.md).
//
// A group is a group of each channel, by the same number; that of the first stands for it here.
//
// Threads: any. Has no lock of its own, and takes those of its channels one at a time.
class Mesh {
 public:
  struct Options : Channel::Options {
    int n_channels = 1;  // at most ProgressThread::kMost; they share the staging
  };
  using Wakeups = Drivers::Wakeups;
  static Wakeups& wakeups() { return Drivers::wakeups(); }

  // `job_key`: what all ranks hold and nobody else; it seals the frames between hosts. `paths`
  // makes the connections to them, each link's at its first use; null: all ranks are of this host.
  static Error create(int rank, std::vector<std::string> names, uint64_t epoch,
                      const Bytes& job_key, std::shared_ptr<Arena> arena,
                      const std::vector<PeerPlace>& peers, const Options& options,
                      std::shared_ptr<Mesh>& out, std::unique_ptr<PathMaker> paths = nullptr);
  ~Mesh() { close(); }

  Group& add_group(uint64_t id, std::vector<int> members);
  void drop_group(Group& group);
  // The same for one that nobody holds any more, unless calls of it are in flight: then false.
  bool drop_unheld_group(Group& group);
  void abort_group(Group& group, const std::string& why);
  // What the caller has found: a deadline that it keeps, or that ranks differ.
  void fail_group(Group& group, Fault fault, const std::string& why);
  Error abort_of(const Group& group) { return first().abort_of(group); }

  // As Channel::post(); the plan says whether the call is cut, into as many lanes as there are
  // channels.
  std::shared_ptr<Call> post(Group& group, const Posting& posting) {
    return posting.plan->n_lanes > 1 ? post_lanes(group, posting) : first().post(group, posting);
  }
  std::shared_ptr<Call> post(Group& group, const Message& message) {
    return first().post(group, message);
  }
  // From now on peers' calls of this plan are made here too; see ServedCalls, which says before
  // whether they can.
  void serve(Group& group, const std::shared_ptr<const Plan>& plan);
  // See turns.h: what this process may have out to other hosts of what takes turns.
  void bound_out(size_t n_bytes);
  bool wait(Call& call, int64_t timeout_ns) { return first().wait(call, timeout_ns); }
  int64_t wait_finished(int64_t seen, int64_t timeout_ns) {
    return first().wait_finished(seen, timeout_ns);
  }
  // Says goodbye, fails what is in flight, ends all links. Idempotent.
  void close();
  bool forsaken() const { return channels_.front()->forsaken(); }

  int n_channels() const { return static_cast<int>(channels_.size()); }
  size_t staging_peak();  // of all channels; each may have had its own at another time
  // As Channel::state(); what the others tell comes as `more`.
  std::shared_ptr<const Value> state(int64_t patience_ns);
  std::shared_ptr<const Value> take_state_at_deadline(Group& group);

 private:
  Mesh() = default;
  Channel& first() const { return *channels_.front(); }
  Error add_channel(int rank, const std::vector<std::string>& names, uint64_t epoch,
                    const Bytes& job_key, std::shared_ptr<Arena> arena,
                    const std::vector<PeerPlace>& peers, const Options& options,
                    std::shared_ptr<PathMaker> paths);
  std::shared_ptr<Call> post_lanes(Group& group, const Posting& posting);

  std::vector<std::shared_ptr<Channel>> channels_;
  int64_t patience_ns_ = 0;              // what close() has with peers that lack data
  std::shared_ptr<FirstErrors> errors_;  // null where there is one channel
  std::atomic<bool> is_closing_{false};
};

}  // namespace shoal
