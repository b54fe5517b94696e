// The receiver reads the sender's shared buffer in place, and reports when it has.
//
//   sender                               receiver
//     offer        ------------------->    folds or copies from the peer's pages, in its own time
//                  <-------------------  consumed, every few segments
//
// Only pages that hold no memory but the call's are offered, since only those can be taken away
// again. Segments at the edges move another way.
#pragma once

#include "engine/segments/way.h"

namespace shoal {

// Threads: under the channel's lock.
class ReferenceWay final : public PlaceWay {
 public:
  // `otherwise`: the way of segments that cannot be offered.
  ReferenceWay(int rank, Links& links, Steps& steps, Staging& staging, Moves& moves, Judge& judge,
               Way& otherwise)
      : PlaceWay(links, steps, staging, moves, judge), rank_(rank), otherwise_(otherwise) {}

  size_t send(Call& call, uint32_t at) override;
  void on_offer(Call& call, uint32_t at, const Header& header, const Place& place);
  size_t take(Call& call, uint32_t at, const Offered& offer) override;
  // Receiver: report consumed segments whose report was put off because more were to follow.
  void send_consumed(Call& call, uint32_t at);

  // Take the memory of a failed call away from a peer that may still read it: the peer must not
  // take what the owner writes next for a result.
  void fence(const Call& call) const;

 private:
  size_t offer(Call& call, uint32_t at);
  void moved(Call& call, uint32_t at) override;
  void fence_offered(const Call& call, uint32_t at) const;

  const int rank_;
  Way& otherwise_;
};

}  // namespace shoal
