#include "engine/segments/call_frames.h"

#include <cstring>

#include "engine/segments/group.h"

namespace shoal {
namespace {

bool is_about_my_send(FrameType type) {
  return type == FrameType::kGrant || type == FrameType::kConsumed;
}

const std::vector<uint32_t>& flows_of(const Call& call, int from, FrameType type) {
  const Program& program = *call.plan->program;
  return (is_about_my_send(type) ? program.sends_to : program.recvs_from)[from];
}

}  // namespace

void CallFrames::arrived(Call& call, int peer, const Header& header, std::span<std::byte> payload) {
  const int from = call.group->rank_of[peer];
  if (from < 0) return judge_.protocol_error(peer, "sent a frame of a group it is not in");
  post_notices_.on_frame(call, from);
  if (header.type == FrameType::kDisagree) return judge_.on_disagree(call, peer, payload);
  if (!call.is_that_of(header)) {
    judge_.disagree(call, peer);
    return ways_.discard(peer, header, payload);
  }
  if (header.type == FrameType::kPost) {
    if (same_lengths(call, from, payload)) steps_.posted(call, from);
    return;
  }
  if (header.type == FrameType::kCommit) return commits_.on_commit(call, from);
  const auto& flows = flows_of(call, from, header.type);
  const bool known = header.flow < flows.size();
  const uint32_t n_segments = known ? call.state[flows[header.flow]].n_segments : 0;
  if (known && call.plan->by_pair) {
    // The blocks differ in length: the post notice, which is on its way, will report it.
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
    case FrameType::kConsumed:
      return call.state[at].way->consumed(call, at, header.segment);
    case FrameType::kPutComplete:
      return ways_.put.on_put_complete(call, at, header);
    case FrameType::kRequestToSend:
      return ways_.eager.on_request_to_send(call, at);
    default:
      return;  // its rule names the part that handles it
  }
}

void CallFrames::on_data(Call& call, uint32_t at, const Header& header,
                         std::span<std::byte> payload) {
  const Step& step = call.plan->program->steps[at];
  if (!call.plan->by_pair || payload.size() == call.wire_bytes(at, header.segment))
    return ways_.on_data(call, at, header, payload);
  ways_.discard(call.peer_of(step), header, payload);
  // A larger block was announced by a post notice, which may be late.
  if ((header.flags & kEager) == 0) return;
  judge_.lengths_differ(call, step.peer, call.group->rank, payload.size(),
                        call.plan->chunk_bytes(step.buffer, step.chunk));
}

bool CallFrames::same_lengths(Call& call, int from, std::span<const std::byte> payload) {
  if (!call.plan->by_pair) return true;
  if (payload.size() != sizeof(Lengths)) {
    judge_.protocol_error((*call.members)[from], "did not report the lengths of its blocks");
    return false;
  }
  Lengths theirs;
  std::memcpy(&theirs, payload.data(), sizeof(Lengths));
  const Lengths ours = call.lengths_with(from);
  const int own = call.group->rank;
  if (theirs.sent != ours.received)
    judge_.lengths_differ(call, from, own, theirs.sent, ours.received);
  else if (theirs.received != ours.sent)
    judge_.lengths_differ(call, own, from, ours.sent, theirs.received);
  return theirs.sent == ours.received && theirs.received == ours.sent;
}

}  // namespace shoal
