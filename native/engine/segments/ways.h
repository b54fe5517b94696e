// The ways of one engine, and the choice among them for each flow.
#pragma once

#include "engine/segments/eager_way.h"
#include "engine/segments/granted_way.h"
#include "engine/segments/put_way.h"
#include "engine/segments/reference_way.h"
#include "engine/segments/slot_way.h"

namespace shoal {

// Threads: under the channel's lock.
class Ways {
 public:
  Ways(int rank, size_t n_peers, Links& links, Steps& steps, Staging& staging, Traffic& traffic,
       Credits& credits, Judge& judge)
      : turns(links, steps, n_peers),
        frames(links, steps, staging, judge, turns, n_peers),
        granted(steps, traffic, staging, frames, n_peers),
        put(links, steps, staging, moves, judge),
        slot(rank, links, steps, staging, moves, judge, traffic, reference),
        reference(rank, links, steps, staging, moves, judge, slot),
        grants(links, steps, judge, granted, put),
        eager(links, steps, traffic, credits, frames, grants),
        links_(links) {}

  // Choose the codec of every flow of a new call, and the way of every send.
  void choose(Call& call);

  // A segment, or an offer of segments, arrived for a receive.
  void on_data(Call& call, uint32_t at, const Header& header, std::span<std::byte> payload);
  void on_offer(Call& call, uint32_t at, const Header& header, const Place& place);
  // Give back what the sender of a frame lent with it, because the frame is of no use here.
  void discard(int peer, const Header& header, std::span<const std::byte> payload);

  // A put or get has completed. Returns the call if it may be over; else null.
  std::shared_ptr<Call> moved(uint64_t token, Moved how);

  // A call has failed: release what is held for it, and stop peers from touching its memory. Links
  // may still touch it (releases.h).
  void take_back(Call& call);
  void drop_peer(int peer);

  Moves moves;
  Turns turns;
  DataFrames frames;
  GrantedWay granted;
  PutWay put;
  SlotWay slot;
  ReferenceWay reference;
  Grants grants;
  EagerWay eager;

 private:
  void choose_codecs(Call& call);
  Way& way_of(const Call& call, uint32_t at);

  Links& links_;
};

}  // namespace shoal
