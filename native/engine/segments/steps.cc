#include "engine/segments/steps.h"

#include <algorithm>
#include <utility>

namespace shoal {

void Steps::make_ready(Call& call, uint32_t at) {
  call.ready.push_back(at);
  if (call.queued) return;
  call.queued = true;
  runnable_.push_back(call.shared_from_this());
}

Call* Steps::next(uint32_t& at) {
  while (!runnable_.empty()) {
    Call& call = *runnable_.front();
    if (!call.ready.empty() && !call.ended) {
      at = call.ready.back();
      call.ready.pop_back();
      return &call;
    }
    call.queued = false;
    runnable_.pop_front();
  }
  return nullptr;
}

bool Steps::is_runnable(uint64_t group) const {
  return std::any_of(runnable_.begin(), runnable_.end(),
                     [&](const auto& call) { return !call->ended && call->group_id == group; });
}

void Steps::posted(Call& call, int from) {
  if (call.posts.posted_by[from]) return;
  call.posts.posted_by[from] = true;
  for (const uint32_t at : call.plan->program->sends_to[from]) make_ready(call, at);
}

void Steps::advance(Call& call, uint32_t at, uint32_t done) {
  StepState& state = call.state[at];
  if (done <= state.done) return;
  const Step& step = call.plan->program->steps[at];
  if (call.is_served && state.done == call.windows.of_chunk[step.chunk].first)
    call.windows.moved.push_back(step.chunk);
  moved_upto(call, at, done);
  if (done == state.n_segments) {
    call.steps_left--;
    if (call.lands_whole(step) && --call.commits.results_left[step.peer] == 0)
      call.commits.held_from.push_back(step.peer);
  }
  if (call.steps_left == 0) {
    call.is_through = call.commits.n_left == 0;
    return;
  }
  if (done < state.n_segments) make_ready(call, at);
  if (step.kind == StepKind::kRecv) {
    for (const uint32_t reply : call.plan->program->sends_to[step.peer])
      if (call.state[reply].cts_flow == step.flow) make_ready(call, reply);
  }
  for (auto next = step.unlocks.rbegin(); next != step.unlocks.rend(); ++next)
    make_ready(call, *next);
}

// Count the moved segments, by any way.
void Steps::moved_upto(Call& call, uint32_t at, uint32_t done) {
  const Step& step = call.plan->program->steps[at];
  StepState& state = call.state[at];
  const uint32_t before = std::exchange(state.done, done);
  state.moved_ns = now_;
  if (step.peer < 0) return;
  const uint64_t n_whole = done - before - 1;  // each but the last, which may be short
  if (call.windows.is_incast && step.kind == StepKind::kRecv)
    call.windows.n_came_in +=
        n_whole * call.plan->segment_bytes + call.segment_bytes(step, done - 1);
  Traffic::Peer& traffic = traffic_[call.peer_of(step)];
  (step.kind == StepKind::kSend ? traffic.n_bytes_out : traffic.n_bytes_in) +=
      n_whole * call.as_encoded(at, call.plan->segment_bytes) + call.wire_bytes(at, done - 1);
}

void Steps::complete(Call& call, uint32_t at, uint32_t segment) {
  StepState& state = call.state[at];
  if (segment == state.done && state.ahead.empty()) return advance(call, at, segment + 1);
  state.ahead.push_back(segment);
  complete_below(call, at, state.done);
}

void Steps::complete_below(Call& call, uint32_t at, uint32_t done) {
  auto& ahead = call.state[at].ahead;
  for (auto next = ahead.begin(); next != ahead.end();) {
    if (*next > done) {
      ++next;
      continue;
    }
    done = std::max(done, *next + 1);
    ahead.erase(next);
    next = ahead.begin();
  }
  advance(call, at, done);
}

void Steps::consume(Call& call, uint32_t at, const std::byte* from) {
  if (from != nullptr) call.use(at, from);
  advance(call, at, call.state[at].done + 1);
}

}  // namespace shoal
