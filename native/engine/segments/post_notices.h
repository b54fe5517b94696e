// Which peers are notified of a call, and when.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "engine/segments/grants.h"

namespace shoal {

// A peer must keep the frames of a call that it has not posted. So while a peer is behind by many
// calls, further ones are held back for that peer alone, until it catches up.
//
// Frames: `post` announces a call to a peer that gets no small data of it.
// Threads: under the channel's lock.
class PostNotices {
 public:
  PostNotices(Links& links, Steps& steps, Grants& grants, size_t n_peers)
      : links_(links), steps_(steps), grants_(grants), ahead_(n_peers, 0), held_(n_peers) {}

  // Decide which peers of a new call are notified now.
  void count(Call& call);
  // Send post notices to those that get no small data of it.
  void announce(const Call& call);
  // Announce a call posted before `posted_before_ns` to the ranks that it sends nothing. Otherwise
  // a mismatch with such a rank would surface only at the deadline.
  void greet_late(Call& call, int64_t posted_before_ns);

  // A frame of the call arrived from group rank `from`, which therefore keeps none of our frames.
  void on_frame(Call& call, int from);
  void finished(Call& call);

 private:
  bool announces_itself(const Call& call, int peer) const;
  void send_post_notice(const Call& call, int peer);
  void leave(Call& call, int from);
  void release_held(int peer);
  void start_with(Call& call, int from);

  Links& links_;
  Steps& steps_;
  Grants& grants_;
  std::vector<uint32_t> ahead_;  // by peer: frames of calls that it has not posted yet
  // By peer: calls held back for it. Lists, because an empty deque takes 600 bytes for every peer.
  std::vector<std::list<std::weak_ptr<Call>>> held_;
};

}  // namespace shoal
