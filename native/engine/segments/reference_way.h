// The receiver reads the sender's shared buffer where it lies, and says when it has.
//
//   sender                               receiver
//     offer        ------------------->    folds or copies from the peer's pages, in its own time
//                  <-------------------  consumed, every few segments
//
// Only pages that hold no memory but the call's are offered: those can be taken away again. What
// lies at their edges moves otherwise.
#pragma once

#include "engine/segments/way.h"

namespace shoal {

// Threads: under the channel's lock.
class ReferenceWay final : public PlaceWay {
 public:
  // `rank`: of this process. `otherwise`: for segments that cannot be offered.
  ReferenceWay(int rank, Links& links, Steps& steps, Staging& staging, Moves& moves, Judge& judge,
               Way& otherwise)
      : PlaceWay(links, steps, staging, moves, judge), rank_(rank), otherwise_(otherwise) {}

  size_t send(Call& call, uint32_t at) override;
  void on_offer(Call& call, uint32_t at, const Header& header, const Place& place);
  size_t take(Call& call, uint32_t at, const Offered& offer) override;
  // Receiver: what was consumed without a word, because more was to come at once.
  void send_consumed(Call& call, uint32_t at);

  // The call has failed: a peer that has yet to hear so must not read what its owner does with the
  // memory now, and take that for a result.
  void fence(const Call& call) const;

 private:
  size_t offer(Call& call, uint32_t at);
  void moved(Call& call, uint32_t at) override;
  void fence_offered(const Call& call, uint32_t at) const;

  const int rank_;
  Way& otherwise_;
};

}  // namespace shoal
