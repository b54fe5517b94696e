// Who hears of a call, and when.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "engine/segments/grants.h"

namespace shoal {

// A peer that has not posted a call keeps what it gets of it. So a peer that was not heard in many
// calls gets nothing of further ones until it is: these are held, for it alone.
//
// Frames: `post` says that a call is posted, where no small data does.
// Threads: under the channel's lock.
class PostNotices {
 public:
  PostNotices(Links& links, Steps& steps, Grants& grants, size_t n_peers)
      : links_(links), steps_(steps), grants_(grants), ahead_(n_peers, 0), held_(n_peers) {}

  // Decides which peers of a new call hear of it now.
  void count(Call& call);
  // Tells those of them whom no small data will tell.
  void announce(const Call& call);
  // A call of small messages does not announce itself to ranks that it sends nothing. If they
  // called something else under its key, nobody would find out before the deadline.
  void greet_late(Call& call, int64_t posted_before_ns);

  // A frame of the call has come from this rank of the group: it keeps nothing of ours any more.
  void heard_in(Call& call, int from);
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
  std::vector<uint32_t> ahead_;  // by peer: frames of calls that it was not heard in
  // By peer: calls that it gets later. NOT deques: an empty one takes 600 bytes, for every peer.
  std::vector<std::list<std::weak_ptr<Call>>> held_;
};

}  // namespace shoal
