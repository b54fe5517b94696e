// The shared-memory links of a channel, which its driver polls.
#pragma once

#include <vector>

#include "engine/shell/engine.h"

namespace shoal {

// The links whose peers ring this process's doorbell. The engine owns the links and may drop them.
//
// Threads: under the channel's lock.
class Rings {
 public:
  explicit Rings(Engine& engine) : engine_(engine) {}

  void add(int peer) { entries_.push_back({peer, engine_.link(peer)}); }
  bool has_inbound() const {
    for (const Entry& entry : entries_)
      if (is_there(entry) && entry.link->has_inbound()) return true;
    return false;
  }
  // True if anything moved, either way.
  bool pump() {
    bool moved = false;
    for (const Entry& entry : entries_) {
      if (!is_there(entry)) continue;
      if (entry.link->has_inbound() || entry.link->has_queued()) moved |= entry.link->pump(engine_);
    }
    return moved;
  }

 private:
  struct Entry {
    int peer;
    Link* link;
  };
  bool is_there(const Entry& entry) const { return engine_.link(entry.peer) == entry.link; }

  Engine& engine_;
  std::vector<Entry> entries_;
};

}  // namespace shoal
