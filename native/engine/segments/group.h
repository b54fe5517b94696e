// A group in this process: its members, its state, and its calls.
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

#include "base/bell.h"
#include "base/error.h"
#include "base/value.h"
#include "engine/life/group_life.h"
#include "engine/segments/call.h"
#include "engine/segments/finished_calls.h"
#include "engine/segments/kept_back.h"
#include "engine/segments/message_counts.h"

namespace shoal {

// A frame of a call that this rank has not posted yet.
struct Early {
  int peer;  // -1: used since
  Header header;
  std::vector<std::byte> payload;
  uint64_t arrival = 0;  // counts the group's early frames
};

// A receive that waits for its message, in the order of its rank's calls (messages.h).
struct Receiving {
  std::shared_ptr<Call> call;
  std::shared_ptr<const Plan> plan;  // as made for one source; it is adapted to the actual one
  int source = -1;                   // group rank; -1: any
};

// The plans that this rank serves in the group (served_calls.h).
struct Served {
  struct OfPlan {
    std::shared_ptr<const Plan> plan;
    uint32_t lane = 0;
    uint64_t last_use = 0;  // as `n_uses` counts
  };
  std::unordered_map<uint32_t, OfPlan> plans;  // by descriptor
  uint64_t n_uses = 0;                         // ever
  std::set<uint64_t> waiting;                  // keys of calls that wait for room
  bool is_full = false;                        // listed in ServedCalls::full_
  size_t n_in_flight = 0;
};

// A subset of the mesh's ranks. Costs no thread, no link and no memory until used.
//
// Shared ownership: one thread may close a group while another is about to make a call on it.
struct Group : std::enable_shared_from_this<Group> {
  uint64_t id = 0;
  int rank = -1;             // of this process, in this group
  std::vector<int> members;  // group rank -> mesh rank; empty: not created yet
  std::vector<int> rank_of;  // mesh rank -> group rank, -1 outside
  GroupLife life;
  uint64_t n_calls = 0;
  // Reports of its end that arrived before it was created, with their senders.
  std::vector<std::pair<int, Error>> early_ends;
  std::unordered_set<int> disputed_with;  // mesh ranks that were sent our side of a mismatch

  std::unordered_map<uint64_t, std::shared_ptr<Call>> in_flight;  // by key
  std::unordered_map<uint64_t, std::vector<Early>> early;
  uint64_t n_early = 0;  // ever
  MessageCounts messages;
  // By tag: the first waiting receive from any source, and every receive after it.
  std::map<int64_t, std::deque<Receiving>> receiving;
  FinishedCalls finished;
  Served served;
  KeptBack kept_back;
  // Rung for a message whose receive is not posted, and when the group ends.
  Bell bell;
  // This rank's state (state_reader.h) just before a deadline ended the group.
  std::shared_ptr<const Value> at_deadline;

  bool is_made() const { return !members.empty(); }
  bool has_calls() const { return !in_flight.empty() || !receiving.empty(); }
  void own(Call& call) {  // make `call` one of this group's
    call.group = this;
    call.group_id = id;
    call.members = &members;
    call.kept_back = &kept_back;
  }
};

}  // namespace shoal
