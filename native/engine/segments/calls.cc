#include "engine/segments/calls.h"

#include <algorithm>
#include <new>
#include <utility>

#include "base/clock.h"

namespace shoal {

std::shared_ptr<Call> Calls::prepare(Group& group, std::shared_ptr<const Plan> plan,
                                     const Memory& memory, int64_t deadline_ns, const Lane& lane) {
  last_prepared_.reset();
  auto call = std::make_shared<Call>();
  last_prepared_ = call;
  group.own(*call);
  call->lane = lane;
  call->plan = std::move(plan);
  call->serial = lane.serial != 0 ? lane.serial : ++group.n_calls;
  call->deadline_ns = deadline_ns;
  for (size_t buffer = 0; buffer < memory.size(); ++buffer) call->memory[buffer] = memory[buffer];
  if (const Error ended = judge_.ended(group)) refuse(*call, ended);
  return call;
}

void Calls::refuse(Call& call, const Error& why) {
  call.error = why;
  call.error.doing = call.doing();
  call.finished_ns = now_ns();
  call.ended = call.finished = true;
}

void Calls::hold(Call& call, uint64_t key) {
  call.key = key;
  call.order = ++n_held_;
  call.posted_ns = now_;
  call.posts.posted_by.assign(call.members->size(), false);
  call.group->in_flight[key] = call.shared_from_this();
  ++n_in_flight_;
}

void Calls::let_go(Call& call) {
  call.group->in_flight.erase(call.key);
  --n_in_flight_;
}

void Calls::relaunch(Call& call, uint64_t key) {
  let_go(call);
  try {
    launch(call, key);
  } catch (const std::bad_alloc&) {
    const auto& in_flight = call.group->in_flight;
    const auto found = in_flight.find(key);
    const bool is_lost = found == in_flight.end() || found->second.get() != &call;
    if (is_lost && !call.ended) {
      call.error = {Fault::kResource, -1, "out of memory"};  // short enough to need none
      call.ended = true;
      finish(call);
    }
    throw;
  }
}

void Calls::launch(Call& call, uint64_t key) {
  Group& group = *call.group;
  if (group.in_flight.count(key) != 0)
    return refuse(call, {Fault::kMismatch, -1, "a call with this name is in flight already"});
  const Program& program = *call.plan->program;
  group.finished.launched(key);
  index(call);
  hold(call, key);
  if (call.is_served) begin_served(call);
  post_notices_.count(call);
  for (uint32_t at = static_cast<uint32_t>(program.steps.size()); at-- > 0;) {
    const Step& step = program.steps[at];
    if (call.state[at].n_segments == 0) continue;
    if (step.waits_for.empty()) steps_.make_ready(call, at);
    if (step.kind == StepKind::kRecv && step.cts_flow != Place::kNoFlow)
      ways_.grants.grant(call, at);
  }
  post_notices_.announce(call);
  grant_far(call);
  use_early(call);
  if (!call.ended) launched(call);
  if (call.steps_left == 0 && !call.ended) end(call, {});
}

void Calls::launch_served(Call& call, uint64_t key) {
  call.is_served = true;
  launch(call, key);
}

void Calls::launched(Call& call) {
  dial_peers_of(call);
  judge_.launched(call);
}

// Also the peers that it only receives from: otherwise the death of one that never connected would
// go unnoticed.
void Calls::dial_peers_of(const Call& call) {
  const auto dial = [&](int peer) {
    if (Link* link = links_[peer]; link != nullptr) link->dial();
  };
  const Group& group = *call.group;
  if (call.unmatched) std::for_each(group.members.begin(), group.members.end(), dial);
  if (call.steps_left == 0) return;
  for (const int from : call.plan->program->peers) dial(group.members[from]);
}

// The call is in flight already: if memory for windows runs out, its group ends and frees them.
void Calls::begin_served(Call& call) {
  call.group->served.n_in_flight++;
  windows_.begin(call);
}

// Compute what follows from the plan and the links.
void Calls::index(Call& call) {
  const Program& program = *call.plan->program;
  call.posts.standing.assign(call.members->size(), PostsOf::kFree);
  call.state.resize(program.steps.size());
  ways_.choose(call);
  for (uint32_t at = 0; at < program.steps.size(); ++at) {
    const Step& step = program.steps[at];
    call.state[at].n_segments = call.plan->n_segments(step, call.lane.index);
    if (call.state[at].n_segments > 0) call.steps_left++;
    if (step.kind == StepKind::kRecv && links_.is_far(call.peer_of(step)))
      call.n_far_bytes += call.as_encoded(at, call.plan->chunk_bytes(step.buffer, step.chunk));
  }
  ways_.turns.join(call);
  Commits::expect(call);
}

// Grants leave before our own data, which may fill the socket, so that the peer can send at the
// same time. Receives that wait only for other receives get their staging now too; otherwise each
// would wait for its grant behind the data of the others.
void Calls::grant_far(Call& call) {
  const Program& program = *call.plan->program;
  for (uint32_t at = 0; at < program.steps.size(); ++at) {
    const Step& step = program.steps[at];
    if (step.kind != StepKind::kRecv || step.cts_flow != Place::kNoFlow) continue;
    if (std::any_of(step.waits_for.begin(), step.waits_for.end(),
                    [&](uint32_t before) { return program.steps[before].kind == StepKind::kSend; }))
      continue;
    const Link* link = links_[call.peer_of(step)];
    if (link != nullptr && !link->shares_memory() && call.state[at].n_segments > 0)
      ways_.grants.grant(call, at);
  }
}

void Calls::use_early(Call& call) {
  std::vector<Early> frames = early_.take(*call.group, call.key);
  for (Early& frame : frames) {
    if (call.ended) break;
    frames_.arrived(call, frame.peer, frame.header, frame.payload);
    early_.used(frame);
    settle(call);
  }
  early_.discard(std::move(frames));
}

void Calls::end(Call& call, const Error& error) {
  if (call.ended) return;
  Group& group = *call.group;
  if (!error && group.life.is_disputed()) return;  // no call succeeds once a mismatch is known
  const auto keep = call.shared_from_this();
  call.error = error;
  call.ready.clear();
  ways_.granted.unreserve(call);
  if (error) {
    releases_.ask(call);
    ways_.take_back(call);
  }
  // From here on it is over.
  let_go(call);
  if (call.is_served) group.served.n_in_flight--;
  call.ended = true;
  const bool had_scratch = finish(call);
  post_notices_.finished(call);
  group.finished.remember(call.key, call.plan, call.subject);
  if (had_scratch) pass_on();
}

void Calls::end_all(Group& group, const Error& why) {
  group.receiving.clear();  // these calls are in flight too
  const auto in_flight = group.in_flight;
  for (const auto& [key, call] : in_flight) {
    Error error = why;
    error.doing = call->doing();
    end(*call, error);
  }
  for (auto& [key, frames] : std::exchange(group.early, {})) early_.discard(std::move(frames));
  group.served = {};
}

// Must not touch the call's group, which may have been freed.
bool Calls::finish(Call& call) {
  if (!call.ended || call.n_unreleased > 0) return false;
  const bool had_scratch = scratch_.give_back(call) || call.is_served;
  if (call.is_served) windows_.give_back(call);
  for (StepState& state : call.state) state.landing = {};
  call.finished_ns = now_ns();
  call.finished.store(true, std::memory_order_release);
  if (hooks_.on_finished) hooks_.on_finished(call);
  return had_scratch;
}

void Calls::released(int peer, uint64_t token) {
  const auto call = releases_.released(peer, token);
  if (call != nullptr && finish(*call)) pass_on();
}

// Release all of them before anything that may run out of memory.
void Calls::drop_peer(int peer) {
  bool had_scratch = false;
  while (const auto call = releases_.next_of(peer))
    if (!call->finished) had_scratch |= finish(*call);
  if (had_scratch) pass_on();
}

void Calls::pass_on() {
  scratch_.pass_on();
  windows_.pass_on();
}

uint32_t Calls::frames_awaited(const Call& call) const {
  if (n_in_flight_ != 1 || call.ended) return 1;
  uint32_t awaited = 0;
  const Program& program = *call.plan->program;
  for (uint32_t at = 0; at < program.steps.size(); ++at) {
    const Step& step = program.steps[at];
    const StepState& state = call.state[at];
    if (state.done == state.n_segments || step.peer < 0) continue;
    // A send may depend on the very next frame, and only frames in shared memory ring the doorbell.
    const Link* link = links_[call.peer_of(step)];
    const bool to_send = step.kind == StepKind::kSend && state.started < state.n_segments;
    if (to_send || link == nullptr || !link->shares_memory() || !state.is_eager) return 1;
    if (step.kind == StepKind::kRecv && state.arrived.empty()) ++awaited;
  }
  return std::max(1u, awaited);
}

}  // namespace shoal
