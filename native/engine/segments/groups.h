// The groups that this process has created or has received frames for.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "engine/life/judge.h"
#include "engine/segments/group.h"

namespace shoal {

// Threads: under the channel's lock.
class Groups {
 public:
  Groups(int rank, size_t n_peers, Judge& judge)
      : rank_(rank), judge_(judge), n_ended_uncreated_(n_peers, 0) {}

  // Create a group, whose frames may have arrived already. The caller must then apply
  // take_early_ends().
  Group& add(uint64_t id, std::vector<int> members);
  // The reports of this group's end that arrived before it was created, with their senders.
  std::vector<std::pair<int, Error>> take_early_ends(Group& group);
  // Drop a group; frames of it that arrive later are known to be late.
  void forget(Group& group);

  Group* find(uint64_t id) const;
  Group& find_or_expect(uint64_t id);         // adds a placeholder for a group not created here
  Call* call_of(const Header& header) const;  // null: no such call in flight
  bool was_dropped(uint64_t id) const { return dropped_.count(id) != 0; }
  // A peer reports the end of a group not created here; the peer may not even be a member.
  void end_uncreated(int peer, uint64_t id, const Error& why);

  size_t size() const { return groups_.size() + dropped_.size(); }  // remembered
  auto begin() const { return groups_.begin(); }
  auto end() const { return groups_.end(); }
  void clear() { groups_.clear(); }

 private:
  const int rank_;
  Judge& judge_;
  std::unordered_map<uint64_t, std::shared_ptr<Group>> groups_;
  std::unordered_set<uint64_t> dropped_;  // the last ones, in order:
  std::deque<uint64_t> dropped_order_;
  std::vector<uint32_t> n_ended_uncreated_;  // such reports, by peer
};

}  // namespace shoal
