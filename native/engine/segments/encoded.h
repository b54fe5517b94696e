// What was encoded for a peer and has not left yet.
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
// before they leave, in the order of the schedule: the rest stays where the caller has it, however
// much was granted.
//
// Every peer may have one payload, beyond the ceiling of staging where there is no room under it:
// so each gets on, whatever the others hold, and no set of calls can block each other.
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
    size_t n_reserved = 0;
  };

  Encoded(Staging& staging, size_t n_peers)
      : staging_(staging), n_kept_(n_peers, 0), waiting_(n_peers) {}

  // Room for one more payload to `peer`.
  Payload take(int peer, size_t n_bytes);
  // Until `token` was sent, or the peer is dropped.
  void keep(uint64_t token, int peer, Payload payload);
  void give_back(const Payload& payload);    // nobody borrows it any more; the block goes by itself
  void wait(int peer, const Waiting& step);  // once, however often it asks
  // Who waits for room that `token` has made; nobody if it was not of an encoded payload. In the
  // order of calls: who takes turns among them sends a little of each, which nobody can fold before
  // the slowest rank has come to the last one. Of each the latest steps of its schedule first.
  std::vector<Waiting> sent(uint64_t token);
  void drop_peer(int peer);  // its link borrows nothing any more

 private:
  // Payloads in all, beyond the first of each peer. They must last until the progress thread comes
  // round: 8 x 64 KiB is 4 ms at 1 Gbit/s. With as many for each peer, ranks send to all others at
  // a time and cables lose to it: four hosts at 1 Gbit/s, 25 MiB, took 3 % longer.
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
