// Between hosts: a segment travels in a frame once the receiver has granted it.
//
//   sender                               receiver
//     post         ------------------->    (if no small data announces the call)
//                  <-------------------  grant: what its step is ready for, and segments ahead of
//     data         ------------------->    that, backed by reserved staging
#pragma once

#include "engine/segments/data_frames.h"
#include "engine/segments/staging.h"
#include "engine/segments/way.h"

namespace shoal {

// Threads: under the channel's lock.
class GrantedWay final : public FrameWay {
 public:
  // The initial number of segments granted ahead per flow, backed by staging: 1 ms at 8 Gbit/s.
  static constexpr uint32_t kFirst = 8;

  GrantedWay(Steps& steps, Traffic& traffic, Staging& staging, DataFrames& frames, size_t n_peers);

  size_t send(Call& call, uint32_t at) override;
  // Receiver: the segment up to which the sender may go, if those below `upto` can be used at once.
  uint32_t look_ahead(Call& call, uint32_t at, uint32_t upto);
  void unreserve(Call& call);  // called when the call is over

 private:
  void reserve(Call& call, uint32_t at, uint32_t most);

  Traffic& traffic_;
  Staging& staging_;
  DataFrames& frames_;
  std::vector<uint32_t> look_ahead_;  // segments of a flow, by peer
};

}  // namespace shoal
