// How bad news goes round: each rank that hears some passes it on once, to log n others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "engine/life/peers.h"
#include "engine/segments/links.h"
#include "transport/frame.h"

namespace shoal {

// Calls `tell(at)` for each of the places 0..size-1 to which `own` passes news: the first living
// one from own + 1, own + 2, own + 4, ... on, round and round. So everyone tells the next living
// one, and a place hears of it by log n ways.
template <class Lives, class Tell>
void for_each_neighbour(int own, int size, Lives lives, Tell tell) {
  for (int64_t step = 1; step < size; step *= 2) {
    int at = static_cast<int>((own + step) % size);
    while (at != own && !lives(at)) at = (at + 1) % size;
    if (at != own) tell(at);
  }
}

// News that this rank has. At all times each piece has been passed to all of this rank's
// neighbours, whoever they are: where one is lost, the one that takes its place is told. So news
// reaches all that live and are connected, whoever dies on its way.
//
// Threads: under the channel's lock.
class News {
 public:
  News(int rank, const Peers& peers, Links& links) : rank_(rank), peers_(peers), links_(links) {}

  // `members`: whom it concerns, by mesh rank; empty: all. `from`: who told this rank.
  void pass(const Header& header, const std::string& text, std::vector<int> members,
            const std::vector<int>& from, int64_t now);
  // Some peer is not what it was.
  void pass_again();
  // A peer does not know the members of this group, or has closed it: it passes nothing on.
  void will_not_pass(int peer, uint64_t group);
  // All that a peer may not have heard, as this rank will pass on nothing more.
  void tell_all(int peer);
  // Long ago everyone has heard.
  void forget_old(int64_t now);
  size_t size() const { return items_.size(); }

 private:
  struct Item {
    Header header;
    std::string text;
    std::vector<int> members;
    std::vector<bool> told, deaf;  // by mesh rank
    int64_t since_ns;
  };
  void pass(Item& item);
  void tell(Item& item, int peer);

  const int rank_;
  const Peers& peers_;
  Links& links_;
  std::deque<Item> items_;
};

}  // namespace shoal
