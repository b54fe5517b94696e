// The order in which a rank sends to several hosts at once.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/segments/call.h"
#include "engine/segments/links.h"
#include "engine/segments/steps.h"

namespace shoal {

// Every rank sends a part of its buffer to every reducer, which folds a segment once it has arrived
// from all ranks. Connections that each run at full speed drift apart, and the segments that are
// ahead on one wait for those that are behind on another: with 8 workers and 8 servers a call
// took 1.6 times as long as its bytes need.
//
// So the sends of a call between hosts that wait for nothing take turns: one segment of each in the
// order of the schedule, then the next of each; short and long sends advance in proportion. A peer
// that has not made the call yet is skipped. A late grant is waited for: reducers grant segments in
// the order in which they fold, so it belongs to the next turn.
//
// The bytes that have left and are not acknowledged are bounded; otherwise the kernel would hold
// megabytes for every connection and send them in its own order. The bound covers the peers of one
// call, so a stopped peer delays only calls with it. All of a long turn, which goes to many peers,
// may be out: with less most links stand idle, and 16 workers and 16 servers took 1.5 times as
// long.
//
// Threads: under the channel's lock.
class Turns {
 public:
  Turns(Links& links, Steps& steps, size_t n_peers)
      : links_(links), steps_(steps), out_(n_peers, 0) {}

  // Bound the unacknowledged bytes over the links of a call's peers, to what keeps the network busy
  // until an acknowledgement arrives. More would only queue in front of it.
  void bound(size_t n_bytes) { most_out_ = n_bytes; }

  // Find out which sends of a new call take turns.
  void join(Call& call);
  // True if the next segment of a send may leave. If not, the step is made ready when it may.
  bool may_send(Call& call, uint32_t at);
  // A segment has left in a frame with this token; 0: the link has copied it.
  void left(Call& call, uint32_t at, uint64_t token, size_t n_bytes);
  // The peer has received the frame.
  void acknowledged(uint64_t token);

  // Forget what has left for a peer, or of a call: no acknowledgement will arrive.
  void drop_peer(int peer);
  void drop_call(const Call& call);

 private:
  struct Sent {
    uint64_t call;  // its order
    int peer;
    size_t n_bytes;
  };

  struct Waiting {
    uint64_t order;
    std::weak_ptr<Call> call;
  };

  static uint64_t turn_of(const Call& call, uint32_t at);
  static bool is_granted(const Call& call, uint32_t at);
  static uint64_t least_turn(const Call& call);
  void advance(Call& call);
  void make_due_ready(Call& call);
  bool has_room(const Call& call) const;
  void forget(std::unordered_map<uint64_t, Sent>::iterator sent);
  void pass_on();

  Links& links_;
  Steps& steps_;
  std::unordered_map<uint64_t, Sent> sent_;  // by token; not acknowledged
  std::vector<size_t> out_;                  // by peer: unacknowledged bytes
  size_t most_out_ = 16u << 20;              // unacknowledged bytes of a call's peers, at most
  std::vector<Waiting> waiting_;             // calls that wait for acknowledgements, by their order
};

}  // namespace shoal
