// What a call still needs of the other ranks, and which of them keep it waiting.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "engine/life/peers.h"
#include "engine/segments/call.h"
#include "engine/segments/group.h"

namespace shoal {

// Threads: under the channel's lock.

// Whether a receive from any rank of the group may wait in vain.
bool nobody_sends(const Group& group, const Peers& peers);
// Whether the call waits for something that `peer` has not said or done yet.
bool needs(const Call& call, int peer, const Peers& peers);
// Whether a frame of `call` has come from that rank of the group, so that it has made the call too.
bool is_in(const Call& call, size_t rank);
// Whether the segment that a receive takes next has come, or is offered.
bool is_here(const StepState& state);
// Whom the call waits for, in words. `names`: of all ranks.
std::string awaited(const Call& call, const std::vector<std::string>& names);

}  // namespace shoal
