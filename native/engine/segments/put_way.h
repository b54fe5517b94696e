// Straight into the receiver's own buffer, if it lies in shared memory and is not folded into.
//
//   sender                               receiver
//                  <-------------------  grant: segments, and the place of the flow
//     copies segments there
//     put complete ------------------->    uses them where they lie
//
// The place is valid for the whole flow. Segments beyond the grant move as without a place.
#pragma once

#include "engine/segments/way.h"

namespace shoal {

// Threads: under the channel's lock.
class PutWay final : public PlaceWay {
 public:
  using PlaceWay::PlaceWay;

  // Receiver: the place of a flow to grant; region 0: none.
  Place place_for(Call& call, uint32_t at);
  void on_place(Call& call, uint32_t at, const Place& place);  // sender
  size_t send(Call& call, uint32_t at) override;
  void on_put_complete(Call& call, uint32_t at, const Header& header);  // receiver
  size_t take(Call& call, uint32_t at, const Offered& offer) override;

  // Take the memory of a failed call away from a peer that may still write to it.
  void fence(const Call& call) const;

 private:
  bool put(Call& call, uint32_t at);
  void moved(Call& call, uint32_t at) override;
  void send_put_complete(Call& call, uint32_t at);
};

}  // namespace shoal
