// Encoded payloads that have not left yet.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/segments/staging.h"

namespace shoal {

struct Call;

// Lends staging for encoded payloads until their link has sent them. Segments are encoded shortly
// before they leave, in the order of the schedule; the others stay in the caller's memory even if
// they are granted.
//
// Each peer may always have one payload, beyond the staging ceiling if need be. So each peer makes
// progress independently of the others, and no set of calls can deadlock.
//
// Threads: under the channel's lock.
class Encoded {
 public:
  struct Waiting {
    uint64_t order;  // of the call
    std::weak_ptr<Call> call;
    uint32_t step;
  };
  struct Payload {
    Block block;  // empty: there is no room now
    Reservation room;
  };

  Encoded(Staging& staging, size_t n_peers)
      : staging_(staging), n_kept_(n_peers, 0), waiting_(n_peers) {}

  // Room for one more payload to `peer`.
  Payload take(int peer, size_t n_bytes);
  // Keep a payload until `token` is sent, it is given back or the peer is dropped.
  void keep(uint64_t token, int peer, Payload payload);
  void give_back(uint64_t token);            // of a payload that left at once
  void wait(int peer, const Waiting& step);  // a step that waits already is not added again
  // The steps that wait for the room made by `token`; none if it was not an encoded payload's.
  // Oldest call first: sending a little of each call would help no rank, since none can fold before
  // the slowest has come to the last call. Within a call, the latest steps of its schedule first.
  std::vector<Waiting> sent(uint64_t token);
  void drop_peer(int peer);  // its link has released every payload

 private:
  // Payloads of all peers together, beyond the first of each. They must keep the link busy until
  // the progress thread's next round: 8 x 64 KiB is 4 ms at 1 Gbit/s. With this many per peer, each
  // rank sends to all others at once: 25 MiB over four hosts at 1 Gbit/s took 3 % longer.
  static constexpr size_t kMost = 8;

  struct Kept {
    int peer;
    Payload payload;
  };

  Staging& staging_;
  std::unordered_map<uint64_t, Kept> kept_;    // by token
  std::vector<uint32_t> n_kept_;               // by peer
  std::vector<std::vector<Waiting>> waiting_;  // by peer
};

}  // namespace shoal
