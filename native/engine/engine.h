// The protocol core: runs programs over links. No I/O and no clock of its own; bytes and time come
// in, bytes and finished calls go out, so that sockets, shared memory and the seeded fake feed the
// very same code. docs/architecture.md tells how a segment travels.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "base/value.h"
#include "engine/collective.h"
#include "engine/encoded.h"
#include "engine/program.h"
#include "engine/staging.h"
#include "engine/traffic.h"
#include "transport/link.h"
#include "transport/slots.h"

namespace shoal {

// Bounds on what peers can make this rank remember.
inline constexpr uint32_t kMaxEagerBytes = 1u << 20;  // per peer, whatever its ceiling allows it

// A frame of a call that this rank has not posted yet.
struct Early {
  int peer;
  Header header;
  std::vector<std::byte> payload;
  uint64_t arrival = 0;  // counts the group's early frames
};

// A receive that waits for its message, in the order of the calls (messages.cc).
struct Receiving {
  std::shared_ptr<Collective> call;
  std::shared_ptr<const Plan> plan;  // its own, for some source
  int source = -1;                   // group rank; -1: whoever sends first
};

// A subset of the mesh's ranks with a name. Costs no thread, no link and no memory until used.
//
// Shared: one thread may close it while another is on its way to call on it.
struct Group : std::enable_shared_from_this<Group> {
  uint64_t id = 0;
  int rank = -1;             // of this process, in this group
  std::vector<int> members;  // group rank -> mesh rank
  std::vector<int> rank_of;  // mesh rank -> group rank, -1 outside
  bool born = false;         // false: only frames of it have been seen
  uint64_t n_calls = 0;
  Error poison;  // set once: everything in flight and later fails with it
  std::vector<std::pair<int, Error>>
      told;        // before it was born: who said that it has ended, and why
  Error departed;  // a member has left in good order: calls that need nothing more of it go on
  std::unordered_set<int> disputed_with;  // mesh ranks that were told what we called
  bool disputed = false;  // ranks called different things; the words for the poison are on the way

  std::unordered_map<uint64_t, std::shared_ptr<Collective>> in_flight;  // by key
  std::unordered_map<uint64_t, std::vector<Early>> early;
  uint64_t n_early = 0;                               // ever
  std::unordered_map<uint64_t, uint64_t> n_messages;  // so far, by channel
  // By tag: a receive from any source that waits, and all receives after it.
  std::map<int64_t, std::deque<Receiving>> receiving;
  std::unordered_map<uint64_t, std::shared_ptr<const Plan>> finished;  // the last calls, by key
  std::deque<uint64_t> finished_order;
  uint64_t last_counted = 0;  // the highest key of a call without a name
  size_t finished_chunks = 0;
  // What this rank could tell (state_reader.h) just before a deadline ended the group.
  std::shared_ptr<const Value> at_deadline;
};

// Threads: one at a time, under the mesh's lock.
class Engine final : public FrameSink {
 public:
  struct Options {
    size_t staging_bytes = 50u << 20;
    int64_t heartbeat_ns = 500'000'000;
    int64_t suspect_ns = 2'000'000'000;
    int64_t dead_ns = 5'000'000'000;
    size_t most_tags = 1u << 22;  // per group; each takes about 50 bytes
  };
  enum class PeerState : uint8_t { kSelf, kAlive, kLeft, kLost };

  Engine(int rank, std::vector<std::string> names, const Options& options);
  ~Engine() override;

  void set_link(int peer, std::unique_ptr<Link> link, int64_t now);
  void set_slots(Slots slots) { slots_ = std::move(slots); }
  Link* link(int peer) const { return links_[peer].get(); }
  int size() const { return static_cast<int>(names_.size()); }

  Group& add_group(uint64_t id, std::vector<int> members);
  void drop_group(Group& group);

  // Starts a call. `memory` is borrowed until it is finished. The first error of the group, if it
  // has ended; no byte moves then.
  std::shared_ptr<Collective> post(Group& group, std::shared_ptr<const Plan> plan, uint64_t key,
                                   const std::vector<std::vector<std::byte*>>& memory,
                                   int64_t deadline_ns);

  // A send to `peer`, or a receive from it (-1: from whoever sends first). Messages of one tag from
  // one rank to another meet in the order of the calls.
  std::shared_ptr<Collective> post_send(Group& group, std::shared_ptr<const Plan> plan, int peer,
                                        int64_t tag, std::byte* data, int64_t deadline_ns);
  std::shared_ptr<Collective> post_recv(Group& group, std::shared_ptr<const Plan> plan, int source,
                                        int64_t tag, std::byte* data, int64_t deadline_ns);

  // Runs what can run, at most about `budget` bytes of it. True if anything moved or can move now.
  bool progress(size_t budget = 1u << 20);
  // Links could take more at once than one turn may send: progress() goes on.
  bool has_unflushed() const { return is_unflushed_; }
  bool has_work() const { return !runnable_.empty() || !endings_.empty(); }
  size_t n_in_flight() const { return n_in_flight_; }
  // A lower bound on the frames that must still come before `call` can finish: a sleeper need not
  // wake earlier. 1 when other calls might need this process sooner.
  uint32_t frames_awaited(const Collective& call) const;

  void tick(int64_t now);              // heartbeats, deadlines, peers that went silent
  bool is_overdue(int64_t now) const;  // some call has reached its deadline
  void heard_from(int peer, int64_t when) { heard_ns_[peer] = std::max(heard_ns_[peer], when); }
  void peer_lost(int peer, const std::string& why);
  void abort_group(Group& group, const Error& why, bool tell);
  void say_goodbye();
  bool has_queued() const;  // in any link
  void pump_all();
  void end_groups(const Error& why, bool tell);  // everything in flight fails
  bool lingers();  // some peer may not have read the goodbye; everything that comes is dropped
  void close();    // every link ends

  // Runs before a group ends for a deadline, here or on another rank; under the lock, must not
  // call back in.
  std::function<void(Group&)> on_deadline;
  // Runs whenever a call finishes or fails; under the lock, must not call back in.
  std::function<void(Collective&)> on_finished;

  // FrameSink
  std::span<std::byte> landing(int peer, const Header& header) override;
  void arrived(int peer, const Header& header, std::span<std::byte> payload) override;
  void sent(int peer, uint64_t token) override;
  void spoiled(int peer, uint64_t token) override;
  void broken(int peer, const Error& error) override;

  PeerState state_of(int peer) const { return peer_state_[peer]; }
  const std::string& name_of_rank(int peer) const { return names_[peer]; }
  const Staging& staging() const { return staging_; }
  size_t scratch_bytes() const { return scratch_bytes_; }                      // held now
  size_t n_groups() const { return groups_.size() + dropped_groups_.size(); }  // remembered

 private:
  friend class StateReader;

  struct Outstanding {  // a borrowed payload on its way
    std::shared_ptr<Collective> call;
    uint32_t step = 0;
    uint32_t segment = 0;
  };

  // Calls (engine.cc)
  std::shared_ptr<Collective> prepare(Group& group, std::shared_ptr<const Plan> plan,
                                      const std::vector<std::vector<std::byte*>>& memory,
                                      int64_t deadline_ns);
  std::shared_ptr<Collective> refuse(Group& group, std::shared_ptr<const Plan> plan,
                                     const Error& why);
  void launch(Collective& call, uint64_t key);
  void remember(Group& group, const Collective& call);
  static bool is_forgotten(const Group& group, uint64_t key);
  bool announces_itself(const Collective& call, int peer) const;

  // Encoding and decoding (codecs.cc)
  void choose_codecs(Collective& call);
  Encoded::Payload encode(Collective& call, uint32_t at);
  void use(Collective& call, uint32_t at, const std::byte* from);

  // Bounds on what calls and peers may take (bounds.cc)
  void count_ahead(Collective& call);
  void look_ahead(Collective& call, uint32_t at, uint32_t upto);
  bool is_held(const Collective& call, int peer) const {
    return call.standing[peer] == Collective::Standing::kHeld;
  }
  void heard_in(Collective& call, int from);
  void leave_ahead(Collective& call, int from);
  void release_held(int peer);
  void start_with(Collective& call, int from);
  static bool has_memory(const Collective& call, const Step& step);
  bool take_scratch(Collective& call);
  void wait_for_scratch(Collective& call, uint32_t at);
  void give_scratch_back(Collective& call);
  void pass_scratch_on();
  void grant_overdue_scratch();
  Group& unborn(uint64_t id);
  void end_unborn(int peer, uint64_t id, const Error& why);
  void forget(Group& group);
  bool was_dropped(uint64_t id) const { return dropped_groups_.count(id) != 0; }

  // Messages (messages.cc)
  static bool is_message(uint64_t key);
  // A call without a name: its key is how many of the group's came before it, more or less.
  static bool is_counted(uint64_t key) { return key >> 62 == 0; }
  uint64_t next_message(const Group& group, int from, int to, int64_t tag) const;
  uint64_t take_message(Group& group, int from, int to, int64_t tag);
  int first_to_send(const Group& group, int64_t tag) const;
  void match(Group& group, int64_t tag);
  void match_early(Group& group, int from, uint64_t key);
  bool nobody_sends(const Group& group) const;
  bool may_count(const Group& group, int from, int to, int64_t tag) const;
  Error too_many_tags() const;

  // Running steps (steps.cc)
  size_t attempt(Collective& call, uint32_t at);
  size_t attempt_send(Collective& call, uint32_t at);
  size_t attempt_recv(Collective& call, uint32_t at);
  size_t attempt_local(Collective& call, uint32_t at);
  size_t send_put(Collective& call, uint32_t at, std::byte* to);
  void say_placed(Collective& call, uint32_t at);
  void say_taken(Collective& call, uint32_t at);
  size_t send_data(Collective& call, uint32_t at, bool eager);
  size_t send_by_reference(Collective& call, uint32_t at, uint32_t ready);
  size_t send_in_slot(Collective& call, uint32_t at);
  uint32_t granted(const Collective& call, uint32_t at) const;
  bool is_eager(const Collective& call, uint32_t at) const;
  // What an early message costs the receiver: the bytes, and a record of the frame.
  static uint32_t eager_cost(size_t n_bytes) { return static_cast<uint32_t>(n_bytes) + 256; }
  size_t recv_from_slot(Collective& call, uint32_t at, const Offered& offer);
  size_t recv_by_reference(Collective& call, uint32_t at, const Offered& offer);
  void consume(Collective& call, uint32_t at, const std::byte* from);
  void grant(Collective& call, uint32_t at);
  void advance(Collective& call, uint32_t at, uint32_t done);
  void moved_upto(Collective& call, uint32_t at, uint32_t done);
  void complete(Collective& call, uint32_t at, uint32_t segment);
  void complete_below(Collective& call, uint32_t at, uint32_t done);
  void make_ready(Collective& call, uint32_t at);
  void finish(Collective& call, const Error& error);
  void fence(const Collective& call);
  void fence_offered(const Collective& call, uint32_t at);

  // Frames in (frames.cc)
  void handle(Collective& call, int peer, const Header& header, std::span<std::byte> payload);
  void on_open(Collective& call, int from, std::span<const std::byte> payload);
  void opened(Collective& call, int from);
  bool same_lengths(Collective& call, int from, std::span<const std::byte> payload);
  void on_grant(Collective& call, int from, const Header& header, const Place& place);
  void on_data(Collective& call, int peer, const Header& header, std::span<std::byte> payload);
  void on_offer(Collective& call, const Header& header, const Place& place, uint32_t at);
  void add_offer(Collective& call, uint32_t at, const Offered& offer);
  void on_taken(Collective& call, const Header& header, int from);
  void taken_by_peer(Collective& call, uint32_t at, uint32_t segment);
  void on_placed(Collective& call, const Header& header, uint32_t at);
  void on_abort(int peer, const Header& header, std::span<std::byte> payload);
  void on_lost(int peer, const Header& header, std::span<std::byte> payload);
  void keep_early(Group& group, int peer, const Header& header, std::span<std::byte> payload);
  void disagree(Collective& call, int peer);
  void lengths_differ(Collective& call, int from, int to, uint64_t sent, uint64_t taken);
  void on_disagree(const Group& group, const Plan& mine, uint64_t key, int peer,
                   std::span<std::byte> payload);
  void owe_credit(int peer, uint32_t n_bytes);
  void discard(int peer, const Header& header, std::span<const std::byte> payload);
  void discard_early(std::vector<Early> frames);
  void give_back(int peer, uint32_t slot);

  Frame frame_for(const Collective& call, FrameType type, uint32_t flow, uint32_t segment) const;
  void send_open(const Collective& call, int peer);
  bool send(int peer, const Frame& frame);
  void send_text(int peer, Header header, const std::string& text);
  void protocol_error(int peer, const std::string& what);
  void flush();
  std::string who(int peer) const;
  Collective* find(const Header& header);
  int64_t now_ = 0;

  const int rank_;
  const std::vector<std::string> names_;  // "rank 3 (host-b, 10.0.0.4)"
  const Options options_;
  Staging staging_;
  Slots slots_;
  Encoded encoded_;

  std::vector<std::unique_ptr<Link>> links_;  // by mesh rank; null: self, left or lost
  std::vector<bool> far_;  // by peer: its link crosses a network, or did while there was one
  std::vector<PeerState> peer_state_;
  std::vector<int64_t> heard_ns_, said_ns_;
  std::vector<bool> to_flush_;
  bool is_unflushed_ = false;
  std::vector<uint32_t> eager_out_, eager_in_, credit_due_;  // bytes, by peer
  std::vector<uint32_t> look_ahead_;                         // segments of a flow, by peer
  std::vector<uint32_t> n_early_;                            // frames kept, by peer
  std::vector<uint32_t> n_ended_unborn_;  // groups that we have not made, by peer
  Traffic traffic_;
  uint32_t eager_allowance_ = 0;
  int64_t last_tick_ns_ = 0;

  struct Landing {
    Block block;
    std::vector<std::byte> control;
    bool in_place = false;
  };
  // By peer and path, from the first frame on: where the payload now arriving goes.
  std::vector<std::unique_ptr<std::array<Landing, Header::kMaxPaths>>> landings_;
  Landing& landing_of(int peer, const Header& header) {
    auto& of_peer = landings_[static_cast<size_t>(peer)];
    if (of_peer == nullptr) of_peer = std::make_unique<std::array<Landing, Header::kMaxPaths>>();
    return (*of_peer)[header.path()];
  }

  std::unordered_map<uint64_t, std::shared_ptr<Group>> groups_;
  std::unordered_set<uint64_t> dropped_groups_;  // the last ones, in order:
  std::deque<uint64_t> dropped_order_;
  std::deque<std::shared_ptr<Collective>> runnable_;
  std::vector<std::pair<std::weak_ptr<Collective>, uint32_t>> waiting_for_slots_;
  std::deque<std::weak_ptr<Collective>> waiting_for_scratch_;
  size_t scratch_bytes_ = 0;
  // Calls whose scratch went beyond the ceiling.
  uint32_t n_overdrawn_ = 0, most_overdrawn_ = 1;
  std::vector<uint32_t> ahead_;  // by peer: frames of calls that it was not heard in
  // By peer: calls that it gets later. NOT deques: an empty one takes 600 bytes, for every peer.
  std::vector<std::list<std::weak_ptr<Collective>>> held_;
  std::unordered_map<uint64_t, Outstanding> outstanding_;  // by token
  struct Text {
    int peer;
    std::shared_ptr<std::string> text;
  };
  std::unordered_map<uint64_t, Text> texts_;  // by token, until sent
  uint64_t next_token_ = 1;
  size_t n_in_flight_ = 0;
  // Lost and broken peers are dealt with after the current frame or step, never inside it.
  struct Breaking {
    int peer;
    std::string why;
    bool at_once;  // the peer has given this rank up: no step runs before
  };
  std::deque<Breaking> breaking_;
  std::vector<std::unique_ptr<Link>> graveyard_;
  void gave_up(int peer, const std::string& why);
  void settle_broken();
  void end_link(int peer, const std::string& why, bool tell);
  struct Ending {
    uint64_t group;
    Error why;
    int n_turns;  // that have passed since it was said
  };
  std::vector<Ending> endings_;
  void settle_endings();
  bool is_runnable(uint64_t group) const;
  // Pairs of other ranks that have lost each other, and why: no group can hold both.
  std::map<std::pair<int, int>, std::string> severed_;
  void severed(int one, int other, const std::string& why);
  Error missing_in(const Group& group) const;
  void settle_departed(int peer);
  void greet_late(Collective& call);
  bool is_in(const Collective& call, size_t rank) const;
  std::string awaited(const Collective& call) const;
  bool needs(const Collective& call, int peer) const;
};

}  // namespace shoal
