#include "engine/segments/groups.h"

#include <algorithm>
#include <string>
#include <utility>

namespace shoal {
namespace {

// The most reports by one peer of ended groups that this rank has not created: how many groups a
// peer may be ahead.
constexpr uint32_t kMostEndedUncreated = 4096;
// Dropped groups that are remembered, so that their late frames are recognised.
constexpr size_t kMostDropped = 1u << 16;

}  // namespace

Group& Groups::add(uint64_t id, std::vector<int> members) {
  Group& group = find_or_expect(id);
  group.rank_of.assign(n_ended_uncreated_.size(), -1);  // may throw, and with members it is made
  for (size_t at = 0; at < members.size(); ++at) group.rank_of[members[at]] = static_cast<int>(at);
  group.members = std::move(members);
  group.rank = group.rank_of[rank_];
  group.life.make();
  dropped_.erase(id);
  return group;
}

std::vector<std::pair<int, Error>> Groups::take_early_ends(Group& group) {
  for (const auto& [by, why] : group.early_ends) n_ended_uncreated_[by]--;
  return std::exchange(group.early_ends, {});
}

void Groups::forget(Group& group) {
  const uint64_t id = group.id;
  if (dropped_.insert(id).second) dropped_order_.push_back(id);
  if (dropped_order_.size() > kMostDropped) {
    dropped_.erase(dropped_order_.front());
    dropped_order_.pop_front();
  }
  groups_.erase(id);
}

Group* Groups::find(uint64_t id) const {
  const auto found = groups_.find(id);
  return found == groups_.end() ? nullptr : found->second.get();
}

Group& Groups::find_or_expect(uint64_t id) {
  if (Group* known = find(id)) return *known;
  auto group = std::make_shared<Group>();
  group->id = id;
  return *groups_.emplace(id, std::move(group)).first->second;
}

Call* Groups::call_of(const Header& header) const {
  const Group* group = find(header.group);
  if (group == nullptr) return nullptr;
  const auto call = group->in_flight.find(header.key);
  return call == group->in_flight.end() ? nullptr : call->second.get();
}

void Groups::end_uncreated(int peer, uint64_t id, const Error& why) {
  const Group* group = find(id);
  const auto by_peer = [&](const auto& report) { return report.first == peer; };
  if (group != nullptr && std::any_of(group->early_ends.begin(), group->early_ends.end(), by_peer))
    return;
  if (n_ended_uncreated_[peer] == kMostEndedUncreated)
    return judge_.protocol_error(peer, "ended more than " + std::to_string(kMostEndedUncreated) +
                                           " groups that this rank has never made");
  n_ended_uncreated_[peer]++;
  find_or_expect(id).early_ends.emplace_back(peer, why);
}

}  // namespace shoal
