// The ways in which a segment moves. Each is one class, with both ends of its protocol in one file:
//
//   eager_way      short flows, at once, in frames                data, request to send, credit
//   granted_way    between hosts, in frames, once granted         grant, data
//   put_way        into the receiver's own shared buffer          grant, put complete
//   reference_way  the receiver reads the sender's shared buffer  offer, consumed
//   slot_way       through one of the sender's slots              offer, consumed (in slot)
//
// A send gets its way when its call is launched (ways.h), or put_way when a grant names a place. A
// receive handles each segment by the way in which it arrived.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "engine/life/judge.h"
#include "engine/segments/call.h"
#include "engine/segments/links.h"
#include "engine/segments/moves.h"
#include "engine/segments/staging.h"
#include "engine/segments/steps.h"

namespace shoal {

// Segments between two notes to the peer that are not urgent. Fewer notes delay the peer's next
// steps; each note costs a wake-up.
inline constexpr uint32_t kSegmentsPerNote = 8;

// The payload of a grant, an offer or a credit.
inline Place place_of(std::span<const std::byte> payload) {
  Place place;
  if (payload.size() == sizeof(Place)) std::memcpy(&place, payload.data(), sizeof(Place));
  return place;
}

class Way {
 public:
  // Sender: move the next segment of a send whose turn has come, to a peer with a link (by
  // reference: all that are ready). Returns about the bytes handled; 0: the step waits, and is made
  // ready when its wait ends.
  virtual size_t send(Call& call, uint32_t at) = 0;
  // Sender: the peer reports that it has used the segments of a send below `segment`.
  virtual void consumed(Call& call, uint32_t at, uint32_t segment) = 0;

 protected:
  ~Way() = default;
};

// Segments that travel in frames.
class FrameWay : public Way {
 public:
  explicit FrameWay(Steps& steps) : steps_(steps) {}

  // Ignored: the link may still read that memory, whatever the peer reports.
  void consumed(Call&, uint32_t, uint32_t) final {}

  // Receiver: use the next segment of a receive whose turn has come; `from` is null if it lies in
  // place already.
  virtual void take(Call& call, uint32_t at, const std::byte* from) {
    steps_.consume(call, at, from);
  }
  // Receiver: the payload of a frame will not be used.
  virtual void give_back(int /*peer*/, size_t /*n_bytes*/) {}

 protected:
  ~FrameWay() = default;

  Steps& steps_;
};

// Segments that one rank puts into the other's memory or gets from there, one of a flow at a time.
class PlaceWay : public Way {
 public:
  PlaceWay(Links& links, Steps& steps, Staging& staging, Moves& moves, Judge& judge)
      : links_(links), steps_(steps), judge_(judge), staging_(staging), moves_(moves) {}

  void consumed(Call& call, uint32_t at, uint32_t segment) final;
  // The put or get that was under way for a step has completed.
  void completed(Call& call, uint32_t at, Moved how);

  // Receiver: use the next segment of a receive whose turn has come, from an offer that holds it.
  virtual size_t take(Call& call, uint32_t at, const Offered& offer) = 0;
  // Receiver: the offer will not be used.
  virtual void give_back(int /*peer*/, const Offered& /*offer*/) {}

 protected:
  ~PlaceWay() = default;
  // True if the call has all the segments of an offer; otherwise the link is dropped.
  bool has_segments(const Call& call, uint32_t at, const Header& header);
  // Keep an offer, in the order of segments; each segment arrives once.
  void keep(Call& call, uint32_t at, const Offered& offer);
  // The target of a get of the next segment of a receive: its place, unless it must land whole.
  Into next_of(Call& call, uint32_t at);
  // A link has started a put or get of the next segment of a step. False if the peer's memory does
  // not exist.
  bool begun(Call& call, uint32_t at, uint64_t token, Moved how);
  // The next segment of a step has been put or gotten.
  virtual void moved(Call& call, uint32_t at) = 0;

  Links& links_;
  Steps& steps_;
  Judge& judge_;

 private:
  Staging& staging_;
  Moves& moves_;
};

}  // namespace shoal
