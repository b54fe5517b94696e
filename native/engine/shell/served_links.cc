#include "engine/shell/served_links.h"

#include <algorithm>
#include <new>

#include "base/clock.h"

namespace shoal {
namespace {

constexpr int64_t kLookNs = 20 * kMillisecond;

}  // namespace

// Events are edge-triggered: bytes left in a socket cause no further event, so note them for the
// next turn. First, since on_event() may run out of memory.
void ServedLinks::serve(int peer, bool ended) {
  Link* link = engine_.link(peer);
  if (link == nullptr) return;
  const bool listed = std::find(unread_.begin(), unread_.end(), peer) != unread_.end();
  if (!listed) unread_.push_back(peer);
  link->on_event(engine_, ended);
  if (link->is_drained()) std::erase(unread_, peer);
}

// A link that lacks memory stays listed, and does not keep the others from being served.
void ServedLinks::serve_unread() {
  bool lacks_memory = false;
  for (size_t at = unread_.size(); at-- > 0;) {
    const int peer = unread_[at];
    if (engine_.link(peer) == nullptr) {
      std::erase(unread_, peer);
      continue;
    }
    try {
      serve(peer, false);
    } catch (const std::bad_alloc&) {
      lacks_memory = true;
    }
  }
  if (lacks_memory) throw std::bad_alloc();
}

void ServedLinks::take_paths(const PathMaker::Watch& watch) {
  for (const int peer : paths_->notify_links(channel_, engine_, watch)) serve(peer, false);
}

void ServedLinks::look(int64_t now, bool at_once) {
  if (paths_ == nullptr || (!at_once && now < look_ns_)) return;
  bool any = false;
  for (int peer = 0; peer < engine_.size(); ++peer) {
    Link* link = engine_.link(peer);
    if (link == nullptr || !link->is_watchful()) continue;
    link->look(engine_, now);
    any = true;
  }
  look_ns_ = now + kLookNs;
  if (any) paths_->wake_at(channel_, look_ns_);
}

}  // namespace shoal
