// The links of a channel that its progress thread serves when their descriptors are ready, and by
// the clock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/shell/engine.h"
#include "transport/path_maker.h"

namespace shoal {

// Threads: under the channel's lock.
class ServedLinks {
 public:
  // `paths`: makes their connections, for this `channel`; null: all peers are on this host.
  ServedLinks(Engine& engine, PathMaker* paths, int channel)
      : engine_(engine), paths_(paths), channel_(static_cast<size_t>(channel)) {
    unread_.reserve(static_cast<size_t>(engine.size()));  // an event must not be lost
  }

  // Serve the link of a peer whose descriptor is ready. `ended`: its other end has closed.
  void serve(int peer, bool ended);
  bool has_unread() const { return !unread_.empty(); }
  void serve_unread();

  // True if the path maker has connections for this channel.
  bool are_called() const { return paths_ != nullptr && paths_->calls(channel_); }
  // Give the links the connections that the path maker has made, and serve them.
  void take_paths(const PathMaker::Watch& watch);
  // Look for silent paths if that is due, or `at_once`.
  void look(int64_t now, bool at_once);

 private:
  Engine& engine_;
  PathMaker* const paths_;
  const size_t channel_;
  std::vector<int> unread_;  // peers whose links may hold unread bytes without a further event
  int64_t look_ns_ = 0;      // when to look again
};

}  // namespace shoal
