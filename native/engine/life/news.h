// Broadcast of failures without a root: each rank forwards a notice once, to log n others.
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

// Call `visit(at)` for each place in 0..size-1 to which `own` forwards news: the first living one
// at or after own + 1, own + 2, own + 4, ..., modulo size. So each place forwards to the next
// living one, and news reaches a place by log n routes.
template <class Lives, class Visit>
void for_each_neighbour(int own, int size, Lives lives, Visit visit) {
  for (int64_t step = 1; step < size; step *= 2) {
    int at = static_cast<int>((own + step) % size);
    while (at != own && !lives(at)) at = (at + 1) % size;
    if (at != own) visit(at);
  }
}

// The notices that this rank has. Each has been sent to all current neighbours: when one is lost,
// its successor is sent them. So a notice reaches every rank that lives and is connected, even if
// ranks die while it travels.
//
// Threads: under the channel's lock.
class News {
 public:
  News(int rank, const Peers& peers, Links& links) : rank_(rank), peers_(peers), links_(links) {}

  // `members`: the mesh ranks concerned; empty: all. `from`: the ranks that sent it to this one.
  void pass(const Header& header, const std::string& text, std::vector<int> members,
            const std::vector<int>& from, int64_t now);
  // The state of a peer has changed: send every notice to neighbours that are new.
  void pass_again();
  // `peer` does not know this group's members or has closed it, and so forwards nothing.
  void will_not_pass(int peer, uint64_t group);
  // Send `peer` every notice that it may lack, because this rank is about to leave.
  void send_all(int peer);
  // Drop notices that are old enough to have reached every rank.
  void forget_old(int64_t now);
  size_t size() const { return items_.size(); }

 private:
  struct Item {
    Header header;
    std::string text;
    std::vector<int> members;
    std::vector<bool> sent_to, not_passing;  // by mesh rank
    int64_t since_ns;
  };
  void pass(Item& item);
  void send(Item& item, int peer);

  const int rank_;
  const Peers& peers_;
  Links& links_;
  std::deque<Item> items_;
};

}  // namespace shoal
