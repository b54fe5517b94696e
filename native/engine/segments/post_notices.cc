#include "engine/segments/post_notices.h"

#include <algorithm>
#include <utility>

#include "engine/segments/group.h"

namespace shoal {
namespace {

// Frames sent to a peer of calls that it has not posted; the peer keeps at most twice as many
// (early_frames.cc).
constexpr uint32_t kMostAhead = 1u << 15;

}  // namespace

void PostNotices::count(Call& call) {
  const Group& group = *call.group;
  if (call.steps_left == 0) return;
  const auto early = group.early.find(call.key);
  for (const int from : call.plan->program->peers) {
    const int peer = group.members[from];
    if (early != group.early.end() &&
        std::any_of(early->second.begin(), early->second.end(),
                    [&](const Early& frame) { return frame.peer == peer; }))
      continue;  // it has made the call
    const bool fits = ahead_[peer] == 0 || ahead_[peer] + call.plan->frames_ahead <= kMostAhead;
    if (held_[peer].empty() && fits) {
      call.posts.standing[from] = PostsOf::kCounted;
      ahead_[peer] += call.plan->frames_ahead;
    } else {
      call.posts.standing[from] = PostsOf::kHeld;
      held_[peer].push_back(call.weak_from_this());
    }
  }
}

// True if the peer learns of this call without a post notice: a small message announces it, in
// either direction.
bool PostNotices::announces_itself(const Call& call, int peer) const {
  const Program& program = *call.plan->program;
  const auto small = [&](uint32_t at) {
    return call.state[at].n_segments > 0 && call.state[at].is_eager;
  };
  const auto& sends = program.sends_to[peer];
  const auto& recvs = program.recvs_from[peer];
  if (!call.plan->by_pair)
    return std::any_of(sends.begin(), sends.end(), small) ||
           std::any_of(recvs.begin(), recvs.end(), small);
  // Data carries its length, which a waiting rank compares. Anything else needs a notice.
  return !sends.empty() && small(sends[0]) && !recvs.empty() && small(recvs[0]);
}

void PostNotices::send_post_notice(const Call& call, int peer) {
  links_.send((*call.members)[peer], call.post_notice(peer));
}

void PostNotices::announce(const Call& call) {
  // An empty call needs no notice, because a rank that makes another call under its key sends one.
  // An empty message does.
  if (call.steps_left == 0 && !call.plan->by_pair && !is_message(call.key)) return;
  for (const int peer : call.plan->program->peers)
    if (!announces_itself(call, peer) && !call.is_held(peer)) send_post_notice(call, peer);
}

void PostNotices::greet_late(Call& call, int64_t posted_before_ns) {
  if (call.posts.notified_all || call.posted_ns > posted_before_ns) return;
  call.posts.notified_all = true;
  for (const int peer : call.plan->program->peers)
    if (!call.is_held(peer)) send_post_notice(call, peer);
}

void PostNotices::on_frame(Call& call, int from) {
  const bool was_held = call.is_held(from);
  leave(call, from);
  if (was_held) start_with(call, from);
}

void PostNotices::finished(Call& call) {
  if (call.unmatched) return;
  for (const int peer : call.plan->program->peers) leave(call, peer);
}

void PostNotices::leave(Call& call, int from) {
  const auto was = std::exchange(call.posts.standing[from], PostsOf::kFree);
  if (was != PostsOf::kCounted) return;
  const int peer = (*call.members)[from];
  ahead_[peer] -= call.plan->frames_ahead;
  release_held(peer);
}

void PostNotices::release_held(int peer) {
  while (!held_[peer].empty()) {
    const auto call = held_[peer].front().lock();
    const int from = call == nullptr || call->ended ? -1 : call->group->rank_of[peer];
    if (from >= 0 && call->is_held(from)) {
      if (ahead_[peer] > 0 && ahead_[peer] + call->plan->frames_ahead > kMostAhead) return;
      call->posts.standing[from] = PostsOf::kCounted;
      ahead_[peer] += call->plan->frames_ahead;
      start_with(*call, from);
    }
    held_[peer].pop_front();
  }
}

// Start the sends and grants of a new call to a peer that is notified of it.
void PostNotices::start_with(Call& call, int from) {
  const Program& program = *call.plan->program;
  if (!announces_itself(call, from)) send_post_notice(call, from);
  for (const uint32_t at : program.recvs_from[from])
    if (program.steps[at].waits_for.empty() || program.steps[at].cts_flow != Place::kNoFlow)
      grants_.grant(call, at);
  for (const uint32_t at : program.sends_to[from]) steps_.make_ready(call, at);
  for (const uint32_t at : program.recvs_from[from]) steps_.make_ready(call, at);
}

}  // namespace shoal
