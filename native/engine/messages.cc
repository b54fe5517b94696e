// Point to point. The n-th message of a tag from one rank to another has a key that both derive; a
// receive from any source waits until the first frame of a message with one of the keys that can be
// next has come, and is posted under that.
#include <utility>

#include "engine/engine.h"

namespace shoal {
namespace {

// The two upper bits part messages from the keys that src/shoal/calls.py makes.
constexpr uint64_t kMessage = uint64_t{3} << 62;
constexpr uint64_t kUnmatched = uint64_t{2} << 62;  // a place among the calls in flight, never sent

// One-to-one, and every bit of the result depends on all bits of `x` (splitmix64).
uint64_t mixed(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

uint64_t channel_of(int from, int to, int64_t tag) {
  const uint64_t ends = uint64_t{static_cast<uint32_t>(from)} << 32 | static_cast<uint32_t>(to);
  return mixed(mixed(ends) ^ static_cast<uint64_t>(tag));
}

uint64_t key_of(uint64_t channel, uint64_t n) { return kMessage | mixed(channel ^ mixed(n)) >> 2; }

}  // namespace

bool Engine::is_message(uint64_t key) { return (key & kMessage) == kMessage; }

// The key of the message after those that were called for.
uint64_t Engine::next_message(const Group& group, int from, int to, int64_t tag) const {
  const uint64_t channel = channel_of(from, to, tag);
  const auto n = group.n_messages.find(channel);
  return key_of(channel, n == group.n_messages.end() ? 0 : n->second);
}

uint64_t Engine::take_message(Group& group, int from, int to, int64_t tag) {
  const uint64_t key = next_message(group, from, to, tag);
  group.n_messages[channel_of(from, to, tag)]++;
  return key;
}

std::shared_ptr<Collective> Engine::post_send(Group& group, std::shared_ptr<const Plan> plan,
                                              int peer, int64_t tag, std::byte* data,
                                              int64_t deadline_ns) {
  if (!may_count(group, group.rank, peer, tag))
    return refuse(group, std::move(plan), too_many_tags());
  const uint64_t key = take_message(group, group.rank, peer, tag);
  return post(group, std::move(plan), key, {{data}}, deadline_ns);
}

std::shared_ptr<Collective> Engine::post_recv(Group& group, std::shared_ptr<const Plan> plan,
                                              int source, int64_t tag, std::byte* data,
                                              int64_t deadline_ns) {
  if (!may_count(group, source, group.rank, tag))
    return refuse(group, std::move(plan), too_many_tags());
  if (source >= 0 && group.receiving.count(tag) == 0) {
    const uint64_t key = take_message(group, source, group.rank, tag);
    auto call = post(group, std::move(plan), key, {{data}}, deadline_ns);
    call->source = source;
    return call;
  }
  auto call = prepare(group, plan, {{data}}, deadline_ns);
  if (call->finished) return call;
  // Until its message is there, it does nothing under a key of its own: it can fail like any call.
  auto nothing = std::make_shared<Plan>();
  nothing->program = idle(static_cast<int>(group.members.size()));
  nothing->descriptor = plan->descriptor;
  call->plan = std::move(nothing);
  call->unmatched = true;
  call->posted_ns = now_;
  call->peer_open.assign(group.members.size(), false);
  call->key = kUnmatched | call->serial;
  group.in_flight[call->key] = call;
  ++n_in_flight_;
  group.receiving[tag].push_back({call, std::move(plan), source});
  match(group, tag);
  if (call->unmatched && group.departed && nobody_sends(group))
    abort_group(group, group.departed, true);
  return call;
}

// Posts the receives of a tag in the order of the calls, up to one from any source for which no
// message has come.
void Engine::match(Group& group, int64_t tag) {
  // Apart from the group: posting may end it.
  std::deque<Receiving> waiting = std::move(group.receiving[tag]);
  group.receiving.erase(tag);
  while (!waiting.empty() && !group.poison) {
    const int source =
        waiting.front().source >= 0 ? waiting.front().source : first_to_send(group, tag);
    if (source < 0) break;
    Receiving next = std::move(waiting.front());
    waiting.pop_front();
    const uint64_t key = take_message(group, source, group.rank, tag);
    Plan plan = *next.plan;
    plan.program = receive_from(source, static_cast<int>(group.members.size()));
    Collective& call = *next.call;
    group.in_flight.erase(call.key);
    --n_in_flight_;
    call.plan = std::make_shared<const Plan>(std::move(plan));
    call.unmatched = false;
    call.source = source;
    launch(call, key);
  }
  if (!waiting.empty() && !group.poison) group.receiving[tag] = std::move(waiting);
}

// Of the ranks whose next message of this tag has come, in part, the one whose came first; or -1.
int Engine::first_to_send(const Group& group, int64_t tag) const {
  int first = -1;
  uint64_t arrival = ~uint64_t{0};
  for (int from = 0; from < static_cast<int>(group.members.size()); ++from) {
    if (from == group.rank) continue;
    const auto early = group.early.find(next_message(group, from, group.rank, tag));
    if (early == group.early.end() || early->second.front().arrival >= arrival) continue;
    first = from;
    arrival = early->second.front().arrival;
  }
  return first;
}

// A frame of a call that is not posted has come.
void Engine::match_early(Group& group, int from, uint64_t key) {
  for (const auto& [tag, waiting] : group.receiving)
    if (next_message(group, from, group.rank, tag) == key) return match(group, tag);
}

bool Engine::may_count(const Group& group, int from, int to, int64_t tag) const {
  return group.n_messages.size() < options_.most_tags ||
         (from >= 0 && group.n_messages.count(channel_of(from, to, tag)) != 0);
}

// Messages of a tag are counted, and no tag is ever forgotten: the other rank may still count.
Error Engine::too_many_tags() const {
  return {Fault::kMismatch, rank_,
          "this rank has met " + std::to_string(options_.most_tags) +
              " pairs of a rank and a tag in this group, which is the most it counts; use tags "
              "again, or make a new group"};
}

bool Engine::nobody_sends(const Group& group) const {
  for (const int member : group.members)
    if (peer_state_[member] == PeerState::kAlive) return false;
  return true;
}

}  // namespace shoal
