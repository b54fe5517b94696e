#include "engine/segments/data_frames.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "engine/segments/group.h"

namespace shoal {
namespace {

// Segments arrive in any order, because they travel by several paths.
bool has_come(const StepState& state, uint32_t segment) {
  return segment < state.done + (state.is_moving ? 1u : 0u) ||
         std::any_of(
             state.arrived.begin(), state.arrived.end(),
             [&](const Arrived& came) { return came.segment == segment; });
}

}  // namespace

// ---- out

// The encoded next segment of a send; empty while too many payloads for the peer wait to leave.
Encoded::Payload DataFrames::encode(Call& call, uint32_t at) {
  const Step& step = call.plan->program->steps[at];
  const StepState& state = call.state[at];
  const int peer = call.peer_of(step);
  Encoded::Payload payload = encoded_.take(peer, call.wire_bytes(at, state.started));
  if (payload.block)
    state.codec->encode(*state.codec, payload.block.data(),
                        call.segment_at(step.buffer, step.chunk, state.started),
                        call.segment_bytes(step, state.started) / size_of(call.plan->dtype));
  else
    encoded_.wait(peer, {call.order, call.weak_from_this(), at});
  return payload;
}

size_t DataFrames::send(Call& call, uint32_t at, uint16_t flags) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const int peer = call.peer_of(step);
  const size_t n_bytes = call.wire_bytes(at, state.started);
  Encoded::Payload encoded;
  if (state.codec != nullptr) {
    encoded = encode(call, at);
    if (!encoded.block) return 0;
  }
  Frame frame = call.frame(FrameType::kData, step.flow, state.started);
  frame.header.length = static_cast<uint32_t>(n_bytes);
  frame.header.flags = flags;
  frame.is_bulk = (flags & kEager) == 0;
  frame.payload = encoded.block ? encoded.block.data()
                                : call.segment_at(step.buffer, step.chunk, state.started);
  frame.is_lent_by_call = !encoded.block;
  frame.token = links_.new_token();
  frame.precedence = {call.order, static_cast<uint32_t>(call.state.size()) - at};
  const bool is_encoded = static_cast<bool>(encoded.block);
  // Before the link borrows it: nothing that runs out of memory below may free it.
  if (is_encoded) encoded_.keep(frame.token, peer, std::move(encoded));
  const uint32_t segment = state.started++;
  bool is_free = true;
  try {
    is_free = links_.send(peer, frame);
  } catch (const std::bad_alloc&) {  // the link has not taken the frame
    if (is_encoded) encoded_.give_back(frame.token);
    throw;
  }
  if (is_encoded && is_free) encoded_.give_back(frame.token);
  turns_.left(call, at, is_free ? 0 : frame.token, n_bytes);
  if (is_encoded) {
    steps_.complete(call, at, segment);  // the segment's own memory is no longer used
  } else if (is_free) {
    steps_.complete(call, at, segment);
  } else {
    borrowed_[frame.token] = {call.shared_from_this(), at, segment};
  }
  if (state.started < state.n_segments) steps_.make_ready(call, at);
  return n_bytes;
}

std::shared_ptr<Call> DataFrames::sent(uint64_t token) {
  turns_.acknowledged(token);
  const auto found = borrowed_.find(token);
  if (found == borrowed_.end()) {
    // The step made ready last is attempted first, so end with the first of the schedule.
    for (const Encoded::Waiting& waiting : encoded_.sent(token))
      if (const auto call = waiting.call.lock(); call && !call->ended)
        steps_.make_ready(*call, waiting.step);
    return nullptr;
  }
  const Borrowed what = std::move(found->second);
  borrowed_.erase(found);
  if (what.call->ended) return nullptr;
  steps_.complete(*what.call, what.step, what.segment);
  return what.call;
}

std::shared_ptr<Call> DataFrames::spoiled(uint64_t token) {
  const auto found = borrowed_.find(token);
  if (found == borrowed_.end()) return nullptr;
  auto call = std::move(found->second.call);
  borrowed_.erase(found);
  return call;
}

void DataFrames::drop_peer(int peer) {
  encoded_.drop_peer(peer);
  turns_.drop_peer(peer);
}

void DataFrames::drop_call(const Call& call) {
  turns_.drop_call(call);
  std::erase_if(borrowed_, [&](const auto& entry) { return entry.second.call.get() == &call; });
}

// ---- in

std::span<std::byte> DataFrames::receive_buffer(int peer, const Header& header, const Call* call) {
  ReceiveBuffer& receive_buffer = receive_buffers_.of(peer, header);
  if (header.type != FrameType::kData) {
    if (header.length > kMaxText) return {};
    receive_buffer.control.resize(header.length);
    return receive_buffer.control;
  }
  const int from = call == nullptr ? -1 : call->group->rank_of[peer];
  if (std::byte* place = from < 0 ? nullptr : own_place(*call, from, header))
    return {place, header.length};
  receive_buffer.block = staging_.take(header.length);
  return {receive_buffer.block.data(), header.length};
}

// Where a segment belongs, if it may be written there now; else nullptr.
std::byte* DataFrames::own_place(const Call& call, int from, const Header& header) const {
  const Program& program = *call.plan->program;
  const auto& flows = program.recvs_from[from];
  if (!call.is_that_of(header) || header.flow >= flows.size()) return nullptr;
  const uint32_t at = flows[header.flow];
  const Step& step = program.steps[at];
  const StepState& state = call.state[at];
  const bool ready = !has_come(state, header.segment) && header.segment < state.n_segments &&
                     header.segment < call.segments_ready(step) && call.has_memory(step);
  if (!ready || step.fold || state.codec != nullptr || call.lands_whole(step) ||
      call.segment_bytes(step, header.segment) != header.length)
    return nullptr;
  return call.segment_at(step.buffer, step.chunk, header.segment);
}

void DataFrames::arrived(Call& call, uint32_t at, const Header& header,
                         std::span<std::byte> payload, FrameWay& way) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const int peer = call.peer_of(step);
  const bool eager = (header.flags & kEager) != 0;
  const bool allowed = eager || header.segment < state.grant_sent;
  if (has_come(state, header.segment) || !allowed || header.segment >= state.n_segments ||
      payload.size() != call.wire_bytes(at, header.segment))
    return judge_.protocol_error(peer, "sent segment " + std::to_string(header.segment) + " of " +
                                           call.doing() +
                                           " twice, unasked, or with a wrong length of " +
                                           std::to_string(payload.size()) + " B");
  // The peer sends this only after consuming our own segment: that send is done.
  if (step.cts_flow != Place::kNoFlow && !eager) {
    const uint32_t before = call.plan->program->sends_to[step.peer][step.cts_flow];
    call.state[before].way->consumed(call, before, header.segment + 1);
  }
  ReceiveBuffer& receive_buffer = receive_buffers_.of(peer, header);
  const bool has_place = call.has_memory(step, header.segment);
  const bool landed =
      has_place && payload.data() == call.segment_at(step.buffer, step.chunk, header.segment);
  if (header.segment == state.done && state.done < call.segments_ready(step) && has_place) {
    // Nested calls reuse the receive buffer, so the block must live until the bytes are used. An
    // early frame lies elsewhere, and the receive buffer may be in use by another.
    Block used;
    if (receive_buffer.block.data() == payload.data()) used = std::move(receive_buffer.block);
    return way.take(call, at, landed ? nullptr : payload.data());
  }
  keep(state, receive_buffer, payload, {header.segment, {}, landed, &way});
}

void DataFrames::keep(StepState& state, ReceiveBuffer& receive_buffer, std::span<std::byte> payload,
                      Arrived came) {
  if (!came.in_place) {
    if (receive_buffer.block && receive_buffer.block.data() == payload.data()) {
      came.block = std::move(receive_buffer.block);
    } else {
      came.block = staging_.take(payload.size());
      std::memcpy(came.block.data(), payload.data(), payload.size());
    }
  }
  state.arrived.push_back(std::move(came));
}

}  // namespace shoal
