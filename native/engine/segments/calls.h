// The start and the end of calls.
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

  // Make a call, without launching it. The call has failed already if its group has ended.
  std::shared_ptr<Call> prepare(Group& group, std::shared_ptr<const Plan> plan,
                                const Memory& memory, int64_t deadline_ns, const Lane& lane = {});
  // The call that was prepared last, if the engine still refers to it. If memory ran out before the
  // caller got it, its memory may be in use. Null: nothing uses that memory.
  std::shared_ptr<Call> last_prepared() const { return last_prepared_.lock(); }
  // Put a prepared call in flight: notify its peers and use the frames of it that arrived early.
  void launch(Call& call, uint64_t key);
  // The same for a call that this rank serves.
  void launch_served(Call& call, uint64_t key);
  // Called once a call is in flight and waits for peers.
  void launched(Call& call);
  // Fail a call that was never in flight.
  static void refuse(Call& call, const Error& why);

  // Keep a call in flight under `key` without running it, so that it can fail like any other.
  void hold(Call& call, uint64_t key);
  // Put a held call in flight under another key. If memory runs out before that, the call ends.
  void relaunch(Call& call, uint64_t key);

  // Send the commits that are due, move windows on, and end the call if no step is left. Must be
  // called after a call's steps have moved.
  void settle(Call& call) {
    if (!call.commits.held_from.empty() && !call.ended) commits_.send_due(call);
    if (call.is_served && !call.ended) windows_.settle(call);
    if (call.is_through && !call.ended) end(call, {});
  }
  // End a call, with or without an error. It is finished at once, or once all links have released
  // its memory. If memory runs out halfway, the call stays in flight and end() may be called again.
  void end(Call& call, const Error& error);
  // Fail every call of a group, and drop early frames of calls that are not posted.
  void end_all(Group& group, const Error& why);
  // A link has released the memory it was asked to, or all memory because it broke or closed.
  void released(int peer, uint64_t token);
  void drop_peer(int peer);
  void clear() { releases_.clear(); }

  size_t n_in_flight() const { return n_in_flight_; }
  // True if a call of the group can go on without further frames.
  bool can_go_on(uint64_t group) const {
    return steps_.is_runnable(group) || ways_.moves.has_any_of(group);
  }
  // A lower bound on the frames that must still arrive before `call` can finish: a sleeper need not
  // wake earlier. 1 when other calls might need this process sooner.
  uint32_t frames_awaited(const Call& call) const;

 private:
  // Finish a call if its memory is released. True if it gave back scratch that other calls wait
  // for.
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
