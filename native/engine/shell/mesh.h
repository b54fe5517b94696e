// A mesh: the channels of this process in one epoch, with their groups, faults and closing.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "engine/shell/channel.h"

namespace shoal {

// The first channel has the links within the host and carries every call that is not cut into
// lanes. The others have links to other hosts only and carry lanes of large calls
// (docs/decisions/0016-channels.md).
//
// A group exists in each channel under the same number; here it is represented by the first one's.
//
// Threads: any. Has no lock of its own, and takes those of its channels one at a time.
class Mesh : public std::enable_shared_from_this<Mesh> {
 public:
  struct Options : Channel::Options {
    int n_channels = 1;  // at most ProgressThread::kMost; they share the staging
  };
  using Wakeups = Drivers::Wakeups;
  static Wakeups& wakeups() { return Drivers::wakeups(); }

  // `job_key`: the secret shared by all ranks; it seals the frames between hosts. `paths` makes the
  // connections to other hosts, each at its link's first use; null: all ranks are on this host.
  static Error create(int rank, std::vector<std::string> names, uint64_t epoch,
                      const Bytes& job_key, std::shared_ptr<Arena> arena,
                      const std::vector<PeerPlace>& peers, const Options& options,
                      std::shared_ptr<Mesh>& out, std::unique_ptr<PathMaker> paths = nullptr);
  ~Mesh() { close(); }

  Group& add_group(uint64_t id, std::vector<int> members);
  void drop_group(Group& group);
  // Drop a group that no caller holds any more; false, without effect, while it has calls in
  // flight.
  bool drop_unheld_group(Group& group);
  void abort_group(Group& group, const std::string& why);
  // Fail a group for a fault that the caller has found: a deadline of its own, or mismatched calls.
  void fail_group(Group& group, Fault fault, const std::string& why);
  Error abort_of(const Group& group) { return first().abort_of(group); }

  // As Channel::post(). If the plan has several lanes, each channel carries one.
  std::shared_ptr<Call> post(Group& group, const Posting& posting) {
    return posting.plan->n_lanes > 1 ? post_lanes(group, posting) : first().post(group, posting);
  }
  std::shared_ptr<Call> post(Group& group, const Message& message) {
    return first().post(group, message);
  }
  // Of the first channel, which has all messages; see Channel.
  bool notify(const Group& group, int fd) { return first().notify(group.id, fd); }
  bool has_message(const Group& group, int from, int64_t tag) {
    return first().has_message(group.id, from, tag);
  }
  // Serve peers' calls of this plan from now on; check ServedCalls::refusal() first.
  void serve(Group& group, const std::shared_ptr<const Plan>& plan);
  // Bound the unacknowledged bytes to other hosts of sends that take turns; see turns.h.
  void bound_out(size_t n_bytes);
  bool wait(Call& call, int64_t timeout_ns) { return first().wait(call, timeout_ns); }
  int64_t wait_finished(int64_t seen, int64_t timeout_ns) {
    return first().wait_finished(seen, timeout_ns);
  }
  // Send the goodbye, fail the calls in flight, end all links. Idempotent.
  void close();
  // Keep the mesh, and close it after this time unless the process ends before. The mesh must be
  // in a shared_ptr. Throws std::system_error if no thread can be started.
  void close_after(int64_t ns);
  bool forsaken() const { return channels_.front()->forsaken(); }

  int n_channels() const { return static_cast<int>(channels_.size()); }
  size_t staging_peak();  // the sum of the channels' peaks, which may lie apart in time
  // As Channel::state(), of the first channel; the others' states are its field `more`.
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
  int64_t patience_ns_ = 0;              // how long close() waits for peers that lack data
  std::shared_ptr<FirstErrors> errors_;  // null if there is one channel
  std::atomic<bool> is_closing_{false};
};

}  // namespace shoal
