// Which ranks a call waits for, and for what.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "engine/life/peers.h"
#include "engine/segments/call.h"
#include "engine/segments/group.h"

namespace shoal {

// Threads: under the channel's lock.

// True if a receive from any source has no rank left that could send.
bool nobody_sends(const Group& group, const Peers& peers);
// True if the call waits for something from `peer`.
bool needs(const Call& call, int peer, const Peers& peers);
// True if a frame of `call` has arrived from that group rank, so that it has made the call too.
bool is_in(const Call& call, size_t rank);
// True if the next segment of a receive has arrived, or is offered.
bool is_here(const StepState& state);
// The ranks that the call waits for, as an error lists them. `names`: by mesh rank.
std::string awaited(const Call& call, const std::vector<std::string>& names);

}  // namespace shoal
