// The protocol core: runs programs over links. It does no I/O and has no clock: bytes and time go
// in, bytes and finished calls come out. So sockets, shared memory and the seeded fake network feed
// the same code. docs/architecture.md shows how a segment travels and lists the engine's parts.
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
  Group* group(uint64_t id) const;  // null: no such group was created on this rank
  void drop_group(Group& group);

  // Start a call. Its memory is borrowed until the call is finished. If the group has ended, the
  // call fails with the group's first error and moves no byte.
  std::shared_ptr<Call> post(Group& group, const Posting& posting, const Lane& lane = {});

  // See ServedCalls; check ServedCalls::refusal() first.
  void serve(Group& group, std::shared_ptr<const Plan> plan, uint32_t lane);
  void bound_out(size_t n_bytes) {
    ways_.turns.bound(n_bytes);
    windows_.bound(2 * n_bytes);  // twice, because grants take time to travel
  }
  bool serves() const { return serves_; }

  // The call being made when memory ran out; see Calls.
  std::shared_ptr<Call> last_prepared() const { return calls_.last_prepared(); }

  // Post a send to a peer or a receive from it (-1: from any). Messages of one tag between two
  // ranks are matched in the order of the calls.
  std::shared_ptr<Call> post(Group& group, const Message& message);

  // True if a frame of the next message of this tag from this rank of the group has arrived.
  bool has_message(const Group& group, int from, int64_t tag) const {
    return group.early.count(group.messages.next(from, group.rank, tag)) != 0;
  }

  // Run steps that can run, up to about `budget` bytes. True if anything moved or can move now.
  bool progress(size_t budget = 1u << 20);
  // True if links could take more than one turn may send; call progress() again.
  bool has_unflushed() const { return links_.is_unflushed(); }
  bool has_work() const {
    return steps_.has_work() || faults_.has_endings() || served_calls_.has_work();
  }
  size_t n_in_flight() const { return calls_.n_in_flight(); }
  // See Calls.
  uint32_t frames_awaited(const Call& call) const { return calls_.frames_awaited(call); }

  void tick(int64_t now);              // heartbeats, deadlines, silent peers
  bool is_overdue(int64_t now) const;  // a call has reached its deadline
  void alive_at(int peer, int64_t when) { parting_.alive_at(peer, when); }
  void peer_lost(int peer, const std::string& why) { parting_.give_up(peer, why); }
  void abort_group(Group& group, const Error& why, bool notify) {
    faults_.abort_group(group, why, notify);
  }
  void say_goodbye();
  bool has_queued() const { return any_living(&Link::has_queued); }
  // A living peer may lack data of calls that succeeded here.
  bool owes_data() const { return any_living(&Link::owes_data); }
  void pump_all();
  void end_groups(const Error& why, bool notify);  // fails every call in flight
  bool lingers();  // some peer may not have read the goodbye; drops every frame that arrives
  void close();    // ends every link

  Hooks hooks;

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
  bool serves_ = false;  // this rank has plans to serve (served_calls.h)

  // First, because every other part refers to it; it refers to some of them in turn.
  Faults faults_;

  // Each refers only to the ones before it.
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
