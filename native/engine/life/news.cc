#include "engine/life/news.h"

#include <algorithm>
#include <utility>

namespace shoal {
namespace {

// No call outlives the loss of a member by this long.
constexpr int64_t kKeptNs = 60'000'000'000;
constexpr size_t kMostKept = 256;

}  // namespace

void News::pass(const Header& header, const std::string& text, std::vector<int> members,
                const std::vector<int>& from, int64_t now) {
  if (items_.size() == kMostKept) items_.pop_front();
  const std::vector<bool> nobody(peers_.size(), false);
  Item& item = items_.emplace_back(Item{header, text, std::move(members), nobody, nobody, now});
  for (const int peer : from) item.sent_to[static_cast<size_t>(peer)] = true;
  pass(item);
}

void News::pass(Item& item) {
  const bool all = item.members.empty();
  const auto peer_at = [&](int at) { return all ? at : item.members[static_cast<size_t>(at)]; };
  const auto passes = [&](int at) {
    const int peer = peer_at(at);
    return peers_.lives(peer) && !item.not_passing[static_cast<size_t>(peer)];
  };
  const auto own = std::find(item.members.begin(), item.members.end(), rank_);
  if (!all && own == item.members.end()) return;  // only members forward it
  const int place = all ? rank_ : static_cast<int>(own - item.members.begin());
  const auto size = static_cast<int>(all ? peers_.size() : item.members.size());
  for_each_neighbour(place, size, passes, [&](int at) { send(item, peer_at(at)); });
}

void News::send(Item& item, int peer) {
  if (item.sent_to[static_cast<size_t>(peer)]) return;
  item.sent_to[static_cast<size_t>(peer)] = true;
  links_.send_text(peer, item.header, item.text);
}

void News::pass_again() {
  for (Item& item : items_) pass(item);
}

void News::will_not_pass(int peer, uint64_t group) {
  for (Item& item : items_) {
    if (item.members.empty() || item.header.group != group) continue;
    item.not_passing[static_cast<size_t>(peer)] = true;
    pass(item);
  }
}

void News::send_all(int peer) {
  for (Item& item : items_)
    if (item.members.empty() ||
        std::find(item.members.begin(), item.members.end(), peer) != item.members.end())
      send(item, peer);
}

void News::forget_old(int64_t now) {
  while (!items_.empty() && now - items_.front().since_ns >= kKeptNs) items_.pop_front();
}

}  // namespace shoal
