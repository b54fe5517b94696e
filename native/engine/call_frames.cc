#include "engine/call_frames.h"

#include <cstring>

#include "engine/group.h"

namespace shoal {
namespace {

bool is_about_my_send(FrameType type) {
  return type == FrameType::kGrant || type == FrameType::kTaken;
}

const std::vector<uint32_t>& flows_of(const Collective& call, int from, FrameType type) {
  const Program& program = *call.plan->program;
  return (is_about_my_send(type) ? program.sends_to : program.recvs_from)[from];
}

}  // namespace

void CallFrames::arrived(Collective& call, int peer, const Header& header,
                         std::span<std::byte> payload) {
  const int from = call.group->rank_of[peer];
  if (from < 0) return judge_.protocol_error(peer, "sent a frame of a group it is not in");
  openings_.heard_in(call, from);
  if (header.type == FrameType::kDisagree)
    return judge_.on_disagree(*call.group, *call.plan, call.key, peer, payload);
  if (header.descriptor != call.plan->descriptor_hash) {
    judge_.disagree(call, peer);
    return ways_.discard(peer, header, payload);
  }
  if (header.type == FrameType::kOpen) {
    if (same_lengths(call, from, payload)) steps_.opened(call, from);
    return;
  }
  const auto& flows = flows_of(call, from, header.type);
  const bool known = header.flow < flows.size();
  const uint32_t n_segments = known ? call.state[flows[header.flow]].n_segments : 0;
  if (known && call.plan->by_pair) {
    // Blocks of different length: the open frame, which is on the way, will say so.
    const uint32_t count = header.type == FrameType::kOffer ? header.count : 0;
    if (uint64_t{header.segment} + count > n_segments) return ways_.discard(peer, header, payload);
  }
  if (!known || header.segment > n_segments)
    return judge_.protocol_error(peer, "named flow " + std::to_string(header.flow) + ", segment " +
                                           std::to_string(header.segment) + " of " + call.doing() +
                                           ", which it does not have");
  const uint32_t at = flows[header.flow];
  switch (header.type) {
    case FrameType::kGrant:
      return ways_.grants.on_grant(call, from, header, place_of(payload));
    case FrameType::kData:
      return on_data(call, at, header, payload);
    case FrameType::kOffer:
      return ways_.on_offer(call, at, header, place_of(payload));
    case FrameType::kTaken:
      return call.state[at].way->taken(call, at, header.segment);
    case FrameType::kPlaced:
      return ways_.put.on_placed(call, at, header);
    case FrameType::kWant:
      return ways_.eager.on_want(call, at);
    default:
      return;  // its rule says where else it goes
  }
}

void CallFrames::on_data(Collective& call, uint32_t at, const Header& header,
                         std::span<std::byte> payload) {
  const Step& step = call.plan->program->steps[at];
  if (!call.plan->by_pair || payload.size() == call.wire_bytes(at, header.segment))
    return ways_.on_data(call, at, header, payload);
  ways_.discard(call.peer_of(step), header, payload);
  // A larger block was announced by an open frame, which may be late.
  if ((header.flags & kEager) == 0) return;
  judge_.lengths_differ(call, step.peer, call.group->rank, payload.size(),
                        call.plan->chunk_bytes(step.buffer, step.chunk));
}

bool CallFrames::same_lengths(Collective& call, int from, std::span<const std::byte> payload) {
  if (!call.plan->by_pair) return true;
  if (payload.size() != sizeof(Lengths)) {
    judge_.protocol_error((*call.members)[from], "did not say how long its blocks are");
    return false;
  }
  Lengths theirs;
  std::memcpy(&theirs, payload.data(), sizeof(Lengths));
  const Lengths ours = call.lengths_with(from);
  const int own = call.group->rank;
  if (theirs.sent != ours.taken)
    judge_.lengths_differ(call, from, own, theirs.sent, ours.taken);
  else if (theirs.taken != ours.sent)
    judge_.lengths_differ(call, own, from, ours.sent, theirs.taken);
  return theirs.sent == ours.taken && theirs.taken == ours.sent;
}

}  // namespace shoal
