// The links of a channel that its progress thread serves: by what their descriptors tell, and by
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
  // `paths`: makes them, for the channel of that number; null: all peers are of this host.
  ServedLinks(Engine& engine, PathMaker* paths, int channel)
      : engine_(engine), paths_(paths), channel_(static_cast<size_t>(channel)) {}

  // A descriptor has told of something, or nobody will tell again of what is left.
  void serve(int peer, bool ended);
  bool has_unread() const { return !unread_.empty(); }
  void serve_unread();

  // Whether the maker has something for this channel.
  bool are_called() const { return paths_ != nullptr && paths_->calls(channel_); }
  // Gives the links what the maker has for them, and serves them.
  void take_paths(const PathMaker::Watch& watch);
  // Looks for paths that have fallen silent, now and then.
  void look(int64_t now, bool at_once);

 private:
  Engine& engine_;
  PathMaker* const paths_;
  const size_t channel_;
  std::vector<int> unread_;  // peers whose links may have something left that nobody tells of
  int64_t look_ns_ = 0;      // when to look again
};

}  // namespace shoal
