// Puts and gets that are under way on a link.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>

#include "engine/segments/call.h"

namespace shoal {

// Threads: under the channel's lock.
class Moves {
 public:
  struct Move {
    std::shared_ptr<Call> call;
    uint32_t step = 0;
    PlaceWay* way = nullptr;
  };

  void keep(uint64_t token, Move move) { moves_[token] = std::move(move); }
  // Take the move with this token, which has completed; its call is null if none waits for it.
  Move take(uint64_t token) {
    const auto found = moves_.find(token);
    if (found == moves_.end()) return {};
    Move move = std::move(found->second);
    moves_.erase(found);
    return move;
  }
  bool has_any_of(uint64_t group) const {
    return std::any_of(moves_.begin(), moves_.end(),
                       [&](const auto& entry) { return entry.second.call->group_id == group; });
  }
  void drop_call(const Call& call) {
    std::erase_if(moves_, [&](const auto& entry) { return entry.second.call.get() == &call; });
  }
  void clear() { moves_.clear(); }

 private:
  std::unordered_map<uint64_t, Move> moves_;  // by token
};

}  // namespace shoal
