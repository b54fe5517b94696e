// Calls begin and end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/segments/call_frames.h"
#include "engine/segments/commits.h"
#include "engine/segments/early_frames.h"
#include "engine/segments/group.h"
#include "engine/segments/hooks.h"
#include "engine/segments/post_notices.h"
#include "engine/segments/posting.h"
#include "engine/segments/releases.h"
#include "engine/segments/scratch.h"
#include "engine/segments/windows.h"

namespace shoal {

// Threads: under the channel's lock. `now`: of the last tick.
class Calls {
 public:
  Calls(Links& links, Steps& steps, Scratch& scratch, Windows& windows, Ways& ways,
        Commits& commits, PostNotices& post_notices, CallFrames& frames, EarlyFrames& early,
        Judge& judge, const Hooks& hooks, const int64_t& now)
      : links_(links),
        steps_(steps),
        scratch_(scratch),
        windows_(windows),
        ways_(ways),
        commits_(commits),
        post_notices_(post_notices),
        frames_(frames),
        early_(early),
        judge_(judge),
        hooks_(hooks),
        now_(now),
        releases_(links) {}

  // A call that is not in flight yet; it has failed already if its group has ended.
  std::shared_ptr<Call> prepare(Group& group, std::shared_ptr<const Plan> plan,
                                const Memory& memory, int64_t deadline_ns, const Lane& lane = {});
  // The call that was prepared last, if anything here still knows it: where memory ran out before
  // it could be handed out, its memory may be in use. Null: nothing touches that.
  std::shared_ptr<Call> last_prepared() const { return last_prepared_.lock(); }
  // Puts a prepared call in flight: its peers hear of it, and what came of it before is used.
  void launch(Call& call, uint64_t key);
  // The same for a call that no caller has made.
  void launch_served(Call& call, uint64_t key);
  // A call in flight waits for others from here on.
  void launched(Call& call);
  // Ends a call that never was in flight.
  static void refuse(Call& call, const Error& why);

  // In flight under `key`, where it does nothing (for now) but can fail as any call.
  void hold(Call& call, uint64_t key);
  // Puts a held call in flight under another key. Where memory runs out before it is, it ends.
  void relaunch(Call& call, uint64_t key);

  // Says what a call has found, and ends it if nothing is left of it. Whoever has moved a call's
  // steps calls this.
  void settle(Call& call) {
    if (!call.commits.held_from.empty() && !call.ended) commits_.tell(call);
    if (call.is_served && !call.ended) windows_.settle(call);
    if (call.is_through && !call.ended) end(call, {});
  }
  // The call is over; with an error before its time. It is finished at once, or when all links have
  // let go of its memory. Where memory runs out in the middle, the call is still in flight, and all
  // of this happens again.
  void end(Call& call, const Error& error);
  // All of a group's, and what came of those that are not posted.
  void end_all(Group& group, const Error& why);
  // A link has let go of what it was asked for, or of everything, being broken or closed.
  void released(int peer, uint64_t token);
  void drop_peer(int peer);
  void clear() { releases_.clear(); }

  size_t n_in_flight() const { return n_in_flight_; }
  // Whether some call of the group can go on with what is here.
  bool can_go_on(uint64_t group) const {
    return steps_.is_runnable(group) || ways_.moves.has_any_of(group);
  }
  // A lower bound on the frames that must still come before `call` can finish: a sleeper need not
  // wake earlier. 1 when other calls might need this process sooner.
  uint32_t frames_awaited(const Call& call) const;

 private:
  // False: it has no scratch memory that others may wait for, or is not finished yet.
  bool finish(Call& call);
  void pass_on();
  void let_go(Call& call);
  void dial_peers_of(const Call& call);
  void index(Call& call);
  void begin_served(Call& call);
  void grant_far(Call& call);
  void use_early(Call& call);

  Links& links_;
  Steps& steps_;
  Scratch& scratch_;
  Windows& windows_;
  Ways& ways_;
  Commits& commits_;
  PostNotices& post_notices_;
  CallFrames& frames_;
  EarlyFrames& early_;
  Judge& judge_;
  const Hooks& hooks_;
  const int64_t& now_;
  Releases releases_;
  std::weak_ptr<Call> last_prepared_;
  size_t n_in_flight_ = 0;
  uint64_t n_held_ = 0;  // ever
};

}  // namespace shoal
