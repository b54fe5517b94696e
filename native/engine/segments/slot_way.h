// Within a host, from private memory: the sender copies a segment into one of its slots, from which
// one or several peers read it.
//
//   sender                               receiver
//     copies a segment into a slot
//     offer (slot) ------------------->    folds or copies it from there
//                  <-------------------  consumed (slot): the slot is free, when all its readers
//                  have sent this
//                  <-------------------  grant, where it starves: it gets the last slot
//
// A segment is done for its sender once it lies in the slot. By the slot's stamp a reader sees
// whether the slot still holds what was offered.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "engine/segments/reference_way.h"
#include "engine/segments/way.h"
#include "transport/slots.h"

namespace shoal {

// Threads: under the channel's lock.
class SlotWay final : public PlaceWay {
 public:
  SlotWay(int rank, Links& links, Steps& steps, Staging& staging, Moves& moves, Judge& judge,
          Traffic& traffic, ReferenceWay& reference)
      : PlaceWay(links, steps, staging, moves, judge),
        rank_(rank),
        traffic_(traffic),
        reference_(reference) {}

  void set_slots(Slots slots) { slots_ = std::move(slots); }

  size_t send(Call& call, uint32_t at) override;
  void on_offer(Call& call, uint32_t at, const Header& header, const Place& place);
  size_t take(Call& call, uint32_t at, const Offered& offer) override;
  void give_back(int peer, const Offered& offer) override { give_back(peer, offer.place); }
  void give_back(int peer, uint32_t slot);
  void on_consumed(int peer, uint32_t slot);  // sender
  void drop_peer(int peer) { slots_.drop_peer(peer); }

 private:
  size_t put_in_slot(Call& call, uint32_t at);
  void moved(Call& call, uint32_t at) override;
  void no_such_slot(const Call& call, uint32_t at);
  uint32_t staged(const Call& call, const Step& step, uint32_t segment) const;
  uint32_t fill_slot(Call& call, const Step& step, uint32_t segment);

  const int rank_;
  Traffic& traffic_;
  ReferenceWay& reference_;
  Slots slots_;
  std::vector<std::pair<std::weak_ptr<Call>, uint32_t>> waiting_;  // sends that wait for a slot
};

}  // namespace shoal
