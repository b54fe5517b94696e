// Short flows leave at once, without a grant; a receiver that is late keeps them.
//
//   sender                                  receiver
//     data (eager)    ------------------->    uses it, or keeps it until its step's turn
//                     <-------------------  credit, once half an allowance was used
//   or, where the allowance is spent:
//     request to send ------------------->
//                     <-------------------  grant
//     data            ------------------->
#pragma once

#include "engine/segments/credits.h"
#include "engine/segments/data_frames.h"
#include "engine/segments/grants.h"
#include "engine/segments/way.h"

namespace shoal {

// Threads: under the channel's lock.
class EagerWay final : public FrameWay {
 public:
  EagerWay(Links& links, Steps& steps, Traffic& traffic, Credits& credits, DataFrames& frames,
           Grants& grants)
      : FrameWay(steps),
        links_(links),
        traffic_(traffic),
        credits_(credits),
        frames_(frames),
        grants_(grants) {}

  size_t send(Call& call, uint32_t at) override;
  void on_request_to_send(Call& call, uint32_t at);  // receiver
  void take(Call& call, uint32_t at, const std::byte* from) override;
  void give_back(int peer, size_t n_bytes) override { credits_.used(peer, n_bytes); }

 private:
  Links& links_;
  Traffic& traffic_;
  Credits& credits_;
  DataFrames& frames_;
  Grants& grants_;
};

}  // namespace shoal
