// Whose turn it is, of what a rank sends to several hosts at once.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/segments/call.h"
#include "engine/segments/links.h"
#include "engine/segments/steps.h"

namespace shoal {

// Where every rank sends a part of its buffer to every reducer, a segment is folded once all ranks'
// have come. Connections that each go as fast as they can drift apart, and what is ahead on one
// waits for what is behind on another: at 8 workers and 8 servers a call took 1.6 times what its
// bytes do.
//
// So the sends of a call between hosts that wait for nothing take turns: a segment of each in the
// order of the schedule, then the next of each; a short one is as far as a long one, in proportion.
// A peer that has not made the call yet holds up nobody. A grant that is late does: those who fold
// grant what comes next in their order, and that is somebody's turn.
//
// What has left and is not acknowledged is bounded: the kernel would hold megabytes for every
// connection, and send them in an order of its own. The bound is one of a call's own peers: one of
// them that stands still holds up nobody who has no call with it. Of a long turn, which
// goes to many, all may be out: with less most of the links stand idle, and 16 workers and 16
// servers took 1.5 times as long.
//
// Threads: under the channel's lock.
class Turns {
 public:
  Turns(Links& links, Steps& steps, size_t n_peers)
      : links_(links), steps_(steps), out_(n_peers, 0) {}

  // What may be out at a time, over the links of a call's peers: what keeps the network busy until
  // an acknowledgement comes. More only waits in front of it.
  void bound(size_t n_bytes) { most_out_ = n_bytes; }

  // Finds out which sends of a new call take turns.
  void join(Call& call);
  // Whether the next segment of a send may leave. If not, what ends its wait makes it ready.
  bool may_send(Call& call, uint32_t at);
  // It has left, in a frame with this token; 0: the link has copied it.
  void left(Call& call, uint32_t at, uint64_t token, size_t n_bytes);
  // The peer has it.
  void acknowledged(uint64_t token);

  // Nobody will hear of what left for this peer, or of this call.
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
  std::vector<size_t> out_;                  // by peer: bytes of these
  size_t most_out_ = 16u << 20;              // that those of a call's peers may be
  std::vector<Waiting> waiting_;             // for what is out to be less, by their order
};

}  // namespace shoal
