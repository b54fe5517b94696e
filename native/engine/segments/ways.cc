#include "engine/segments/ways.h"

#include <utility>

#include "base/shared_memory.h"

namespace shoal {

// Choose the codec of each flow between hosts, as the plan demands. A finished value that leaves
// encoded is rounded here too, so that this rank has the same bits as those that decode it.
void Ways::choose_codecs(Call& call) {
  const Program& program = *call.plan->program;
  if (!call.plan->narrow) return;
  const Narrow* const narrow = &*call.plan->narrow;
  for (uint32_t at = 0; at < program.steps.size(); ++at) {
    const Step& step = program.steps[at];
    const bool talks = step.kind == StepKind::kSend || step.kind == StepKind::kRecv;
    if (talks && links_.is_far(call.peer_of(step))) call.state[at].codec = narrow;
  }
  for (uint32_t at = 0; at < program.steps.size(); ++at) {
    const Step& step = program.steps[at];
    if (step.kind != StepKind::kFinish) continue;
    for (const uint32_t next : step.unlocks)
      if (program.steps[next].kind == StepKind::kSend && call.state[next].codec != nullptr)
        call.state[at].codec = narrow;
  }
}

void Ways::choose(Call& call) {
  choose_codecs(call);
  const Program& program = *call.plan->program;
  for (uint32_t at = 0; at < program.steps.size(); ++at) {
    const Step& step = program.steps[at];
    if (step.kind != StepKind::kSend && step.kind != StepKind::kRecv) continue;
    StepState& state = call.state[at];
    const Link* link = links_[call.peer_of(step)];
    const uint64_t n_bytes = call.plan->chunk_bytes(step.buffer, step.chunk);
    state.is_eager = link != nullptr && call.as_encoded(at, n_bytes) <= link->max_inline();
    if (step.kind == StepKind::kSend) state.way = state.unplaced = &way_of(call, at);
  }
}

Way& Ways::way_of(const Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  if (call.state[at].is_eager) return eager;
  const Link* link = links_[call.peer_of(step)];
  if (link == nullptr || !link->shares_memory()) return granted;
  if (step.buffer == kScratch) return slot;
  const std::byte* from = call.chunk(step.buffer, step.chunk);
  if (Regions::of_process().whole(from).id != 0) return reference;
  return slot;
}

void Ways::on_data(Call& call, uint32_t at, const Header& header, std::span<std::byte> payload) {
  const bool is_eager = (header.flags & kEager) != 0;
  frames.arrived(call, at, header, payload, is_eager ? static_cast<FrameWay&>(eager) : granted);
}

void Ways::on_offer(Call& call, uint32_t at, const Header& header, const Place& place) {
  if ((header.flags & kInSlot) != 0)
    slot.on_offer(call, at, header, place);
  else
    reference.on_offer(call, at, header, place);
}

void Ways::discard(int peer, const Header& header, std::span<const std::byte> payload) {
  if (header.type == FrameType::kData && (header.flags & kEager) != 0)
    eager.give_back(peer, payload.size());
  if (header.type == FrameType::kOffer && (header.flags & kInSlot) != 0)
    slot.give_back(peer, place_of(payload).region);
}

std::shared_ptr<Call> Ways::moved(uint64_t token, Moved how) {
  const Moves::Move move = moves.take(token);
  if (move.call != nullptr) move.way->completed(*move.call, move.step, how);
  return move.call;
}

void Ways::take_back(Call& call) {
  moves.drop_call(call);  // first: it ends nothing that waits
  for (uint32_t at = 0; at < call.state.size(); ++at) {
    const Step& step = call.plan->program->steps[at];
    StepState& state = call.state[at];
    for (const Arrived& came : std::exchange(state.arrived, {}))
      came.way->give_back(call.peer_of(step), call.wire_bytes(at, came.segment));
    for (const Offered& offer : std::exchange(state.offered, {}))
      if (offer.first + offer.count > state.done) offer.way->give_back(call.peer_of(step), offer);
  }
  frames.drop_call(call);
  put.fence(call);  // NOT after the other: see Regions::fence
  reference.fence(call);
}

void Ways::drop_peer(int peer) {
  frames.drop_peer(peer);
  slot.drop_peer(peer);
}

}  // namespace shoal
