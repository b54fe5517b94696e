// Straight into the receiver's own buffer, where that lies in shared memory and is not folded into.
//
//   sender                               receiver
//                  <-------------------  grant: segments, and the place of the flow
//     copies segments there
//     put complete ------------------->    uses them where they lie
//
// The place holds for the whole flow. Segments beyond what is granted move as they would without.
#pragma once

#include "engine/segments/way.h"

namespace shoal {

// Threads: under the channel's lock.
class PutWay final : public PlaceWay {
 public:
  using PlaceWay::PlaceWay;

  // Receiver: the place of a flow to grant; region 0: there is none.
  Place place_for(Call& call, uint32_t at);
  void on_place(Call& call, uint32_t at, const Place& place);  // sender
  size_t send(Call& call, uint32_t at) override;
  void on_put_complete(Call& call, uint32_t at, const Header& header);  // receiver
  size_t take(Call& call, uint32_t at, const Offered& offer) override;

  // The call has failed: a peer that has yet to hear so must not write to its memory any more.
  void fence(const Call& call) const;

 private:
  bool put(Call& call, uint32_t at);
  void moved(Call& call, uint32_t at) override;
  void send_put_complete(Call& call, uint32_t at);
};

}  // namespace shoal
