#include "engine/shell/engine.h"

#include <algorithm>
#include <utility>

#include "transport/frame_rules.h"

namespace shoal {

Engine::Engine(int rank, std::vector<std::string> names, const Options& options)
    : rank_(rank),
      names_(std::move(names)),
      options_(options),
      faults_(rank, names_, links_, calls_, groups_, peers_, news_, parting_, hooks, *this, now_),
      staging_(options.staging_bytes),
      traffic_(names_.size()),
      links_(names_.size(), traffic_, now_),
      credits_(links_, names_.size(), options.staging_bytes),
      steps_(traffic_, now_),
      scratch_(rank, staging_, steps_, faults_, now_),
      windows_(staging_, steps_),
      ways_(rank, names_.size(), links_, steps_, staging_, traffic_, credits_, faults_),
      runner_(links_, steps_, scratch_, ways_),
      commits_(links_, faults_),
      post_notices_(links_, steps_, ways_.grants, names_.size()),
      call_frames_(steps_, ways_, commits_, post_notices_, faults_),
      early_(names_.size(), ways_, faults_),
      calls_(links_, steps_, scratch_, windows_, ways_, commits_, post_notices_, call_frames_,
             early_, faults_, hooks, now_),
      served_calls_(calls_, faults_),
      messages_(rank, calls_, options.most_tags),
      groups_(rank, names_.size(), faults_),
      peers_(names_.size(), rank),
      news_(rank, peers_, links_),
      parting_(rank, options, links_, ways_, calls_, groups_, peers_, news_, faults_, *this, now_) {
  staging_.reserve(credits_.reserve_bytes());
}

// Calls hold staging blocks, which must be freed before the staging; callers may keep the calls.
Engine::~Engine() {
  for (const auto& [id, group] : groups_)
    for (const auto& [key, call] : group->in_flight) {
      call->state.clear();
      call->windows.of_chunk.clear();
    }
  ways_.frames.clear();
  ways_.moves.clear();
  calls_.clear();
  steps_.clear();
  groups_.clear();
}

void Engine::set_link(int peer, std::unique_ptr<Link> link, int64_t now) {
  now_ = now;
  parting_.alive_at(peer, now);
  links_.set(peer, std::move(link));
}

// ---- groups and calls

Group& Engine::add_group(uint64_t id, std::vector<int> members) {
  Group& group = groups_.add(id, std::move(members));
  faults_.made(group);
  parting_.made(group);
  return group;
}

Group* Engine::group(uint64_t id) const {
  Group* found = groups_.find(id);
  return found != nullptr && found->is_made() ? found : nullptr;
}

void Engine::drop_group(Group& group) {
  abort_group(group, {Fault::kClosed, -1, "the group was closed with this call in flight"}, false);
  groups_.forget(group);
}

void Engine::end_groups(const Error& why, bool notify) {
  for (auto& [id, group] : groups_) abort_group(*group, why, notify);
}

std::shared_ptr<Call> Engine::post(Group& group, const Posting& posting, const Lane& lane) {
  auto call = calls_.prepare(group, posting.plan, posting.memory, posting.deadline_ns, lane);
  call->subject = posting.subject;
  if (!call->finished) calls_.launch(*call, posting.key);
  return call;
}

std::shared_ptr<Call> Engine::post(Group& group, const Message& message) {
  return message.sends ? messages_.send(group, message) : messages_.recv(group, message);
}

void Engine::serve(Group& group, std::shared_ptr<const Plan> plan, uint32_t lane) {
  serves_ = true;
  windows_.open(options_.staging_bytes);
  served_calls_.serve(group, std::move(plan), lane);
}

// ---- running

bool Engine::progress(size_t budget) {
  size_t moved = 0;
  // An evicted rank must not use shared memory: the peer may have other data there by now.
  if (parting_.is_evicted()) parting_.settle(faults_.has_endings());
  served_calls_.begin_waiting();
  uint32_t at = 0;
  while (moved < budget) {
    Call* call = steps_.next(at);
    if (call == nullptr) break;
    moved += runner_.attempt(*call, at);
    calls_.settle(*call);
  }
  flush();
  faults_.settle_endings();
  // A peer that ends a group and then leaves has reported why; that comes first.
  parting_.settle(faults_.has_endings());
  return moved > 0 || has_work();  // links that were flushed may have made room for more
}

void Engine::sent(int, uint64_t token) {
  links_.sent(token);
  if (const auto call = ways_.frames.sent(token)) calls_.settle(*call);
}

void Engine::moved(int, uint64_t token, Moved how) {
  if (const auto call = ways_.moved(token, how)) calls_.settle(*call);
}

// The peer is about to report a corrupt payload, but the program here wrote to a buffer being sent.
void Engine::spoiled(int peer, uint64_t token) {
  const auto call = ways_.frames.spoiled(token);
  if (call == nullptr || call->ended) return;
  faults_.spoiled(*call, peer);
}

// ---- time

void Engine::tick(int64_t now) {
  const int64_t last_ns = std::exchange(now_, now);
  traffic_.sample(now);
  news_.forget_old(now);
  parting_.listen(last_ns);
  scratch_.grant_overdue();
  for (auto& [id, group] : groups_) {
    for (const auto& [key, call] : group->in_flight) {
      if (now < call->deadline_ns) {
        post_notices_.greet_late(*call, now - options_.heartbeat_ns);
        continue;
      }
      faults_.timed_out(*call);
      break;  // in_flight is empty now
    }
  }
  flush();
  parting_.settle(faults_.has_endings());
  links_.destroy_removed();
}

bool Engine::is_overdue(int64_t now) const {
  const auto late = [&](const auto& entry) { return now >= entry.second->deadline_ns; };
  return std::any_of(groups_.begin(), groups_.end(), [&](const auto& entry) {
    const auto& calls = entry.second->in_flight;
    return std::any_of(calls.begin(), calls.end(), late);
  });
}

// ---- frames in

std::span<std::byte> Engine::receive_buffer(int peer, const Header& header) {
  const bool is_data = header.type == FrameType::kData;
  return ways_.frames.receive_buffer(peer, header, is_data ? groups_.call_of(header) : nullptr);
}

void Engine::arrived(int peer, const Header& header, std::span<std::byte> payload) {
  parting_.mark_alive(peer);
  traffic_[peer].n_frames_in++;
  links_.will_flush(peer);  // to send the acknowledgement
  if (const Link* link = links_[peer]; link != nullptr) {
    const uint8_t over = link->shares_memory() ? kOverRing : kOverTcp;
    const std::string broken = broken_rule(header, payload.size(), over);
    if (!broken.empty()) return faults_.protocol_error(peer, broken);
  }
  if (!is_for_link(peer, header, payload)) of_a_group(peer, header, payload);
}

// True if a frame belongs to no group, or is handled without regard to its group; it is done then.
bool Engine::is_for_link(int peer, const Header& header, std::span<std::byte> payload) {
  switch (header.type) {
    case FrameType::kHeartbeat:
    case FrameType::kAck:  // the link has seen to it
      return true;
    case FrameType::kCredit:
      credits_.came_back(peer, place_of(payload).offset);
      return true;
    case FrameType::kGoodbye:
      parting_.left(peer);
      return true;
    case FrameType::kAsk:
    case FrameType::kAnswer:
      parting_.on_asking(peer, header);
      return true;
    case FrameType::kUnmade:
      news_.will_not_pass(peer, header.group);
      return true;
    case FrameType::kAbort:
      faults_.on_abort(peer, header, payload);
      return true;
    case FrameType::kLost:
      faults_.on_lost(peer, header, payload);
      return true;
    case FrameType::kData:
      if ((header.flags & kEager) == 0 || credits_.came(peer, payload.size())) return false;
      faults_.protocol_error(peer, "sent more than its allowance of data without asking");
      return true;
    case FrameType::kConsumed:
      if ((header.flags & kInSlot) == 0) return false;
      ways_.slot.on_consumed(peer, header.count);
      return true;
    default:
      return false;
  }
}

void Engine::of_a_group(int peer, const Header& header, std::span<std::byte> payload) {
  Group* known = groups_.find(header.group);
  if (known == nullptr) {
    // The group was closed here, or the frame disputes a call that was not made here.
    if (groups_.was_dropped(header.group) || header.type == FrameType::kDisagree)
      return ways_.discard(peer, header, payload);
    return keep_early(groups_.find_or_expect(header.group), peer, header, payload);
  }
  Group& group = *known;
  if (group.is_made() && group.rank_of[peer] < 0)
    return faults_.protocol_error(peer, "sent a frame of a group it is not in");
  if (const auto found = group.in_flight.find(header.key); found != group.in_flight.end()) {
    const auto call = found->second;
    call_frames_.arrived(*call, peer, header, payload);
    return calls_.settle(*call);
  }
  if (auto past = group.finished.past(header.key); past.plan != nullptr)
    return of_a_past_call(group, std::move(past), peer, header, payload);
  keep_early(group, peer, header, payload);
}

void Engine::of_a_past_call(Group& group, FinishedCalls::Past was, int peer, const Header& header,
                            std::span<std::byte> payload) {
  Call past;
  group.own(past);
  past.plan = std::move(was.plan);
  past.subject = was.subject;
  past.key = header.key;
  if (header.type == FrameType::kDisagree) return faults_.on_disagree(past, peer, payload);
  const bool differs = !past.is_that_of(header);
  if (differs && !group.life.has_ended()) faults_.disagree(past, peer);
  if (!differs && header.type == FrameType::kPost)
    call_frames_.same_lengths(past, group.rank_of[peer], payload);
  ways_.discard(peer, header, payload);
}

void Engine::keep_early(Group& group, int peer, const Header& header,
                        std::span<std::byte> payload) {
  if (!early_.keep(group, peer, header, payload)) return;
  if (is_message(header.key)) group.bell.ring();
  if (!group.receiving.empty()) messages_.came_early(group, group.rank_of[peer], header.key);
  if (!group.served.plans.empty()) served_calls_.came_early(group, header);
}

// ---- the end

// No rank should learn that we leave before it learns why, and we forward nothing after this.
void Engine::say_goodbye() {
  faults_.settle_all_endings();
  Frame frame;
  frame.header.type = FrameType::kGoodbye;
  for (int peer = 0; peer < static_cast<int>(links_.size()); ++peer) {
    if (links_[peer] == nullptr) continue;
    // A peer that never connected is notified when it does.
    if (!peers_.has_left(peer) && !links_[peer]->is_unlinked()) news_.send_all(peer);
    links_.send(peer, frame);
  }
  flush();
}

bool Engine::any_living(bool (Link::*holds)() const) const {
  for (size_t peer = 0; peer < links_.size(); ++peer)
    if (peers_.lives(static_cast<int>(peer)) && links_[peer] != nullptr && (links_[peer]->*holds)())
      return true;
  return false;
}

void Engine::pump_all() {
  for (size_t peer = 0; peer < links_.size(); ++peer)
    if (links_[peer] != nullptr) links_[peer]->pump(*this);
  progress();
}

bool Engine::lingers() {
  bool any = false;
  for (size_t peer = 0; peer < links_.size(); ++peer)
    any |= links_[peer] != nullptr && links_[peer]->lingers();
  return any;
}

void Engine::close() {
  for (size_t peer = 0; peer < links_.size(); ++peer) {
    if (links_[peer] == nullptr) continue;
    links_[peer]->close();
    links_.remove(static_cast<int>(peer));
    calls_.drop_peer(static_cast<int>(peer));
    peers_.become(static_cast<int>(peer), PeerState::kLeft);
  }
}

}  // namespace shoal
