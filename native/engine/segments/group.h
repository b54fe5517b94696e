// A group as this process knows it: its members, what has ended it, and its calls.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/value.h"
#include "engine/life/group_life.h"
#include "engine/segments/call.h"
#include "engine/segments/finished_calls.h"
#include "engine/segments/message_counts.h"

namespace shoal {

// A frame of a call that this rank has not posted yet.
struct Early {
  int peer;  // -1: used since
  Header header;
  std::vector<std::byte> payload;
  uint64_t arrival = 0;  // counts the group's early frames
};

// A receive that waits for its message, in the order of the calls (messages.h).
struct Receiving {
  std::shared_ptr<Call> call;
  std::shared_ptr<const Plan> plan;  // its own, for some source
  int source = -1;                   // group rank; -1: whoever sends first
};

// What a rank of the group serves (served_calls.h).
struct Served {
  struct OfPlan {
    std::shared_ptr<const Plan> plan;
    uint32_t lane = 0;
    uint64_t last_use = 0;  // as `n_uses` counts
  };
  std::unordered_map<uint32_t, OfPlan> plans;  // by descriptor
  uint64_t n_uses = 0;                         // ever
  std::set<uint64_t> waiting;                  // keys of calls that have no room yet
  bool is_full = false;                        // some wait, and ServedCalls knows that
  size_t n_in_flight = 0;
};

// A subset of the mesh's ranks with a name. Costs no thread, no link and no memory until used.
//
// Shared: one thread may close it while another is on its way to call on it.
struct Group : std::enable_shared_from_this<Group> {
  uint64_t id = 0;
  int rank = -1;             // of this process, in this group
  std::vector<int> members;  // group rank -> mesh rank; empty: only frames of it have been seen
  std::vector<int> rank_of;  // mesh rank -> group rank, -1 outside
  GroupLife life;
  uint64_t n_calls = 0;
  std::vector<std::pair<int, Error>>
      told;                               // before it was made: who said that it has ended, and why
  std::unordered_set<int> disputed_with;  // mesh ranks that were told what we called

  std::unordered_map<uint64_t, std::shared_ptr<Call>> in_flight;  // by key
  std::unordered_map<uint64_t, std::vector<Early>> early;
  uint64_t n_early = 0;  // ever
  MessageCounts messages;
  // By tag: a receive from any source that waits, and all receives after it.
  std::map<int64_t, std::deque<Receiving>> receiving;
  FinishedCalls finished;
  Served served;
  // What this rank could tell (state_reader.h) just before a deadline ended the group.
  std::shared_ptr<const Value> at_deadline;

  bool is_made() const { return !members.empty(); }
  bool has_calls() const { return !in_flight.empty() || !receiving.empty(); }
  void own(Call& call) {  // one of its calls
    call.group = this;
    call.group_id = id;
    call.members = &members;
  }
};

}  // namespace shoal
