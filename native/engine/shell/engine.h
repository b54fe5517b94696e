// The protocol core: runs programs over links. No I/O and no clock of its own; bytes and time come
// in, bytes and finished calls go out, so that sockets, shared memory and the seeded fake feed the
// very same code. docs/architecture.md tells how a segment travels, and of what parts this is made.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/life/faults.h"
#include "engine/life/news.h"
#include "engine/life/parting.h"
#include "engine/life/peers.h"
#include "engine/segments/call_frames.h"
#include "engine/segments/calls.h"
#include "engine/segments/commits.h"
#include "engine/segments/early_frames.h"
#include "engine/segments/groups.h"
#include "engine/segments/hooks.h"
#include "engine/segments/links.h"
#include "engine/segments/messages.h"
#include "engine/segments/post_notices.h"
#include "engine/segments/runner.h"
#include "engine/segments/scratch.h"
#include "engine/segments/served_calls.h"
#include "engine/segments/staging.h"
#include "engine/segments/steps.h"
#include "engine/segments/traffic.h"
#include "engine/segments/ways.h"
#include "engine/segments/windows.h"

namespace shoal {

// Threads: one at a time, under the channel's lock.
class Engine final : public FrameSink {
 public:
  struct Options : Parting::Options {
    size_t staging_bytes = 50u << 20;
    size_t most_tags = 1u << 22;  // per group; each takes about 50 bytes
  };
  using PeerState = shoal::PeerState;

  Engine(int rank, std::vector<std::string> names, const Options& options);
  ~Engine() override;

  void set_link(int peer, std::unique_ptr<Link> link, int64_t now);
  void set_slots(Slots slots) { ways_.slot.set_slots(std::move(slots)); }
  Link* link(int peer) const { return links_[peer]; }
  int size() const { return static_cast<int>(names_.size()); }

  Group& add_group(uint64_t id, std::vector<int> members);
  Group* group(uint64_t id) const;  // null: none of that number is made here
  void drop_group(Group& group);

  // Starts a call. `memory` is borrowed until it is finished. The first error of the group, if it
  // has ended; no byte moves then.
  std::shared_ptr<Call> post(Group& group, const Posting& posting, const Lane& lane = {});

  // See ServedCalls, which says before whether it can.
  void serve(Group& group, std::shared_ptr<const Plan> plan, uint32_t lane);
  void bound_out(size_t n_bytes) {
    ways_.turns.bound(n_bytes);
    windows_.bound(2 * n_bytes);  // as much again while grants are on their way
  }
  bool serves() const { return serves_; }

  // Where memory ran out as a call was made: see Calls.
  std::shared_ptr<Call> last_prepared() const { return calls_.last_prepared(); }

  // A send to `peer`, or a receive from it (-1: from whoever sends first). Messages of one tag from
  // one rank to another meet in the order of the calls.
  std::shared_ptr<Call> post(Group& group, const Message& message);

  // Runs what can run, at most about `budget` bytes of it. True if anything moved or can move now.
  bool progress(size_t budget = 1u << 20);
  // Links could take more at once than one turn may send: progress() goes on.
  bool has_unflushed() const { return links_.is_unflushed(); }
  bool has_work() const {
    return steps_.has_work() || faults_.has_endings() || served_calls_.has_work();
  }
  size_t n_in_flight() const { return calls_.n_in_flight(); }
  // See Calls.
  uint32_t frames_awaited(const Call& call) const { return calls_.frames_awaited(call); }

  void tick(int64_t now);              // heartbeats, deadlines, peers that went silent
  bool is_overdue(int64_t now) const;  // some call has reached its deadline
  void heard_from(int peer, int64_t when) { parting_.heard_from(peer, when); }
  void peer_lost(int peer, const std::string& why) { parting_.give_up(peer, why); }
  void abort_group(Group& group, const Error& why, bool tell) {
    faults_.abort_group(group, why, tell);
  }
  void say_goodbye();
  bool has_queued() const { return any_living(&Link::has_queued); }
  // A peer that lives may lack data of calls that may have ended well here.
  bool owes_data() const { return any_living(&Link::owes_data); }
  void pump_all();
  void end_groups(const Error& why, bool tell);  // everything in flight fails
  bool lingers();  // some peer may not have read the goodbye; everything that comes is dropped
  void close();    // every link ends

  Hooks hooks;  // what its owner hears of

  // FrameSink
  std::span<std::byte> receive_buffer(int peer, const Header& header) override;
  void arrived(int peer, const Header& header, std::span<std::byte> payload) override;
  void sent(int peer, uint64_t token) override;
  void spoiled(int peer, uint64_t token) override;
  void moved(int peer, uint64_t token, Moved how) override;
  void released(int peer, uint64_t token) override { calls_.released(peer, token); }
  void broken(int peer, const Error& error) override { parting_.broken(peer, error); }

  PeerState state_of(int peer) const { return peers_[peer]; }
  const std::string& name_of_rank(int peer) const { return names_[peer]; }
  const Staging& staging() const { return staging_; }
  uint64_t inbound_bytes() const { return windows_.n_inbound(); }  // that windows allow
  size_t scratch_bytes() const { return scratch_.n_bytes() + windows_.n_bytes(); }  // held now
  size_t n_groups() const { return groups_.size(); }                                // remembered

 private:
  friend class StateReader;

  // Frames in
  bool is_for_link(int peer, const Header& header, std::span<std::byte> payload);
  void of_a_group(int peer, const Header& header, std::span<std::byte> payload);
  void of_a_past_call(Group& group, FinishedCalls::Past was, int peer, const Header& header,
                      std::span<std::byte> payload);
  void keep_early(Group& group, int peer, const Header& header, std::span<std::byte> payload);

  bool any_living(bool (Link::*holds)() const) const;  // link to a peer that lives
  void flush() { links_.flush(*this); }

  const int rank_;
  const std::vector<std::string> names_;  // "rank 3 (host-b, 10.0.0.4)"
  const Options options_;
  int64_t now_ = 0;      // of the last tick
  bool serves_ = false;  // calls may begin here that nobody waits for

  // The judge of all the others, which know it: so it stands first, though it knows some of them.
  Faults faults_;

  // Each knows those before it.
  Staging staging_;
  Traffic traffic_;
  Links links_;
  Credits credits_;
  Steps steps_;
  Scratch scratch_;
  Windows windows_;
  Ways ways_;
  Runner runner_;
  Commits commits_;
  PostNotices post_notices_;
  CallFrames call_frames_;
  EarlyFrames early_;
  Calls calls_;
  ServedCalls served_calls_;
  Messages messages_;
  Groups groups_;
  Peers peers_;
  News news_;
  Parting parting_;
};

}  // namespace shoal
