// Segments that travel in frames, granted or eager. A segment is encoded if its flow is, lent to
// the link until it has left, and received in its place or in staging.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>

#include "engine/segments/encoded.h"
#include "engine/segments/receive_buffers.h"
#include "engine/segments/staging.h"
#include "engine/segments/turns.h"
#include "engine/segments/way.h"

namespace shoal {

// Threads: under the channel's lock.
class DataFrames {
 public:
  DataFrames(Links& links, Steps& steps, Staging& staging, Judge& judge, Turns& turns,
             size_t n_peers)
      : links_(links),
        steps_(steps),
        staging_(staging),
        judge_(judge),
        turns_(turns),
        encoded_(staging, n_peers),
        receive_buffers_(n_peers) {}

  // Send the next segment of a send. 0: too many encoded payloads wait for the peer's link.
  size_t send(Call& call, uint32_t at, uint16_t flags);
  // A frame has left. Returns the call whose segment it was if that call may be through; else null.
  std::shared_ptr<Call> sent(uint64_t token);
  // The call whose segment changed while it was being sent, or null.
  std::shared_ptr<Call> spoiled(uint64_t token);

  // The buffer for the payload of a frame. `call`: the frame's, if this rank has it in flight.
  std::span<std::byte> receive_buffer(int peer, const Header& header, const Call* call);
  // A segment of a receive arrived by `way`.
  void arrived(Call& call, uint32_t at, const Header& header, std::span<std::byte> payload,
               FrameWay& way);
  // Free the buffer of a frame whose payload was copied elsewhere.
  void drop_receive_buffer(int peer, const Header& header) {
    receive_buffers_.of(peer, header).block = {};
  }

  void drop_call(const Call& call);  // no link borrows its memory any more
  void drop_peer(int peer);
  void clear() { borrowed_.clear(); }

 private:
  struct Borrowed {  // a payload on its way
    std::shared_ptr<Call> call;
    uint32_t step = 0;
    uint32_t segment = 0;
  };

  Encoded::Payload encode(Call& call, uint32_t at);
  std::byte* own_place(const Call& call, int from, const Header& header) const;
  void keep(StepState& state, ReceiveBuffer& receive_buffer, std::span<std::byte> payload,
            Arrived came);

  Links& links_;
  Steps& steps_;
  Staging& staging_;
  Judge& judge_;
  Turns& turns_;
  Encoded encoded_;
  ReceiveBuffers receive_buffers_;
  std::unordered_map<uint64_t, Borrowed> borrowed_;  // by token
};

}  // namespace shoal
