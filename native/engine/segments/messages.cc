#include "engine/segments/messages.h"

#include <string>
#include <utility>

#include "engine/segments/program_builder.h"

namespace shoal {

// Make the call; it has failed already if its tag exceeds the limit on tags, which are never
// forgotten.
std::shared_ptr<Call> Messages::prepare(Group& group, const Message& message, int from, int to) {
  auto call = calls_.prepare(group, message.plan, {{message.data}}, message.deadline_ns);
  if (!call->finished && !group.messages.may_take(from, to, message.tag, most_tags_))
    Calls::refuse(
        *call, {Fault::kMismatch, rank_,
                "this rank has used " + std::to_string(most_tags_) +
                    " pairs of a rank and a tag in this group, which is the limit; reuse tags, or "
                    "make a new group"});
  return call;
}

std::shared_ptr<Call> Messages::send(Group& group, const Message& message) {
  auto call = prepare(group, message, group.rank, message.peer);
  if (!call->finished)
    calls_.launch(*call, group.messages.take(group.rank, message.peer, message.tag));
  return call;
}

std::shared_ptr<Call> Messages::recv(Group& group, const Message& message) {
  const int source = message.peer;
  const int64_t tag = message.tag;
  auto call = prepare(group, message, source, group.rank);
  if (call->finished) return call;
  if (source >= 0 && group.receiving.count(tag) == 0) {
    calls_.launch(*call, group.messages.take(source, group.rank, tag));
    call->source = source;
    return call;
  }
  wait(group, call, source, tag);
  match(group, tag);
  if (call->unmatched) calls_.launched(*call);
  return call;
}

// Hold a receive, under a key of its own, until its message has arrived.
void Messages::wait(Group& group, const std::shared_ptr<Call>& call, int source, int64_t tag) {
  auto nothing = std::make_shared<Plan>();
  nothing->program = ProgramBuilder(static_cast<int>(group.members.size())).done();
  nothing->descriptor = call->plan->descriptor;
  std::shared_ptr<const Plan> plan = std::exchange(call->plan, std::move(nothing));
  call->unmatched = true;
  calls_.hold(*call, kUnmatched | call->serial);
  group.receiving[tag].push_back({call, std::move(plan), source});
}

// Post the receives of a tag in the order of the calls, up to the first from any source for which
// no message has arrived.
void Messages::match(Group& group, int64_t tag) {
  // Move the list out of the group, because posting may end the group.
  std::deque<Receiving> waiting = std::move(group.receiving[tag]);
  group.receiving.erase(tag);
  while (!waiting.empty() && !group.life.has_ended()) {
    const int source =
        waiting.front().source >= 0 ? waiting.front().source : first_to_send(group, tag);
    if (source < 0) break;
    Receiving next = std::move(waiting.front());
    waiting.pop_front();
    auto plan = std::make_shared<Plan>(*next.plan);
    ProgramBuilder steps(static_cast<int>(group.members.size()));
    steps.recv(source, 0);
    plan->program = steps.done();
    const uint64_t key = group.messages.take(source, group.rank, tag);
    Call& call = *next.call;
    call.plan = std::move(plan);
    call.unmatched = false;
    call.source = source;
    calls_.relaunch(call, key);
  }
  if (!waiting.empty() && !group.life.has_ended()) group.receiving[tag] = std::move(waiting);
}

// The rank whose next message of this tag arrived first, at least in part; -1 if none has.
int Messages::first_to_send(const Group& group, int64_t tag) {
  int first = -1;
  uint64_t arrival = ~uint64_t{0};
  for (int from = 0; from < static_cast<int>(group.members.size()); ++from) {
    if (from == group.rank) continue;
    const auto early = group.early.find(group.messages.next(from, group.rank, tag));
    if (early == group.early.end() || early->second.front().arrival >= arrival) continue;
    first = from;
    arrival = early->second.front().arrival;
  }
  return first;
}

void Messages::came_early(Group& group, int from, uint64_t key) {
  for (const auto& [tag, waiting] : group.receiving)
    if (group.messages.next(from, group.rank, tag) == key) return match(group, tag);
}

}  // namespace shoal
