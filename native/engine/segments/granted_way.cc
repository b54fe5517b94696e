#include "engine/segments/granted_way.h"

#include <algorithm>
#include <utility>

namespace shoal {
namespace {

// The maximum: 64 x 128 KiB arrive in 7 ms at 10 Gbit/s, a few scheduling turns of a busy core.
constexpr uint32_t kMost = 64;

}  // namespace

GrantedWay::GrantedWay(Steps& steps, Traffic& traffic, Staging& staging, DataFrames& frames,
                       size_t n_peers)
    : FrameWay(steps),
      traffic_(traffic),
      staging_(staging),
      frames_(frames),
      look_ahead_(n_peers, kFirst) {}

size_t GrantedWay::send(Call& call, uint32_t at) {
  if (call.state[at].started < call.granted(at)) return frames_.send(call, at, 0);
  return stalled(traffic_[call.peer_of(call.plan->program->steps[at])].no_grant);
}

// Reserve staging for segments from `upto`. The reservations must cover the bandwidth-delay
// product, which is unknown. If every reserved segment has arrived before more were reserved, the
// sender was stalled, so the peer's flows get twice as many.
uint32_t GrantedWay::look_ahead(Call& call, uint32_t at, uint32_t upto) {
  StepState& state = call.state[at];
  const int peer = call.peer_of(call.plan->program->steps[at]);
  uint32_t& ahead = look_ahead_[static_cast<size_t>(peer)];
  const bool starved = state.reserved > 0 && state.done + state.arrived.size() >= state.grant_sent;
  if (starved && state.reserved >= ahead) ahead = std::min(2 * ahead, kMost);
  const uint32_t most = call.may_come(at);
  reserve(call, at, std::min(ahead, most - upto));
  if (state.reserved == 0) traffic_[peer].no_staging++;
  return std::min(upto + state.reserved, most);
}

void GrantedWay::reserve(Call& call, uint32_t at, uint32_t most) {
  StepState& state = call.state[at];
  const size_t n_bytes = call.as_encoded(at, call.plan->segment_bytes);
  for (uint32_t wish = most; wish > state.reserved; wish /= 2) {
    if (!staging_.reserve((wish - state.reserved) * n_bytes)) continue;
    state.reserved = wish;
    return;
  }
}

void GrantedWay::unreserve(Call& call) {
  for (uint32_t at = 0; at < call.state.size(); ++at)
    if (const uint32_t reserved = std::exchange(call.state[at].reserved, 0); reserved > 0)
      staging_.unreserve(reserved * call.as_encoded(at, call.plan->segment_bytes));
}

}  // namespace shoal
