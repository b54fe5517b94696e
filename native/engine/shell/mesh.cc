#include "engine/shell/mesh.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/signals_blocked.h"

namespace shoal {
namespace {

// The peers that a channel has links to.
std::vector<PeerPlace> share_of(const std::vector<PeerPlace>& peers, int channel) {
  std::vector<PeerPlace> share;
  for (const PeerPlace& peer : peers)
    if (channel == 0 || !peer.is_local) share.push_back(peer);
  return share;
}

// Combine the states of the channels that have one.
std::shared_ptr<const Value> together(std::vector<std::shared_ptr<const Value>> states) {
  std::erase(states, nullptr);
  if (states.size() < 2) return states.empty() ? nullptr : states.front();
  List more;
  for (size_t at = 1; at < states.size(); ++at) more.push_back(*states[at]);
  Value all = *states.front();
  std::get<Fields>(all.is).emplace_back("more", std::move(more));
  return std::make_shared<const Value>(std::move(all));
}

}  // namespace

Error Mesh::create(int rank, std::vector<std::string> names, uint64_t epoch, const Bytes& job_key,
                   std::shared_ptr<Arena> arena, const std::vector<PeerPlace>& peers,
                   const Options& options, std::shared_ptr<Mesh>& out,
                   std::unique_ptr<PathMaker> paths) {
  std::shared_ptr<Mesh> mesh(new Mesh);
  if (options.n_channels > 1) mesh->errors_ = std::make_shared<FirstErrors>(options.n_channels);
  const std::shared_ptr<PathMaker> maker = std::move(paths);
  const int64_t resume_ns = maker == nullptr ? 0 : maker->source(0).resume_ns();
  mesh->patience_ns_ = PathLink::kSilentNs + std::max(PathLink::kFirstPathNs, resume_ns);
  Error error;
  for (int channel = 0; channel < options.n_channels && !error; ++channel) {
    if (channel > 0) {
      arena = std::make_shared<Arena>();
      error = Arena::create(1, *arena);
    }
    if (!error)
      error = mesh->add_channel(rank, names, epoch, job_key, arena, share_of(peers, channel),
                                options, maker);
  }
  if (!error) out = std::move(mesh);
  return error;
}

Error Mesh::add_channel(int rank, const std::vector<std::string>& names, uint64_t epoch,
                        const Bytes& job_key, std::shared_ptr<Arena> arena,
                        const std::vector<PeerPlace>& peers, const Options& options,
                        std::shared_ptr<PathMaker> paths) {
  Channel::Options own = options;
  own.engine.staging_bytes /= static_cast<size_t>(options.n_channels);
  Channel::Place place;
  place.index = n_channels();
  if (place.index > 0) place.first = channels_.front();
  place.errors = errors_;
  place.paths = std::move(paths);
  std::shared_ptr<Channel> channel;
  Error error = Channel::create(rank, names, epoch, job_key, std::move(arena), peers, own,
                                std::move(place), channel);
  if (channel != nullptr) channels_.push_back(std::move(channel));
  return error;
}

Group& Mesh::add_group(uint64_t id, std::vector<int> members) {
  for (size_t at = channels_.size(); --at > 0;) channels_[at]->add_group(id, members);
  Group& group = first().add_group(id, std::move(members));
  // Another channel may have known of the group's end before this one had the group.
  if (errors_ != nullptr)
    if (const Error first_error = errors_->of(id))
      for (const auto& channel : channels_) channel->end_group(id, first_error);
  return group;
}

void Mesh::drop_group(Group& group) {
  const auto keep = group.shared_from_this();
  for (const auto& channel : channels_) channel->drop_group(group.id);
  if (errors_ != nullptr) errors_->forget(group.id);
}

bool Mesh::drop_unheld_group(Group& group) {
  if (forsaken() || is_closing_) return true;  // it is dropped with the mesh
  for (const auto& channel : channels_)
    if (channel->has_calls(group.id)) return false;
  drop_group(group);
  return true;
}

void Mesh::abort_group(Group& group, const std::string& why) {
  for (const auto& channel : channels_)
    channel->abort_group(group.id, Fault::kClosed, "aborted the group: " + why);
}

void Mesh::fail_group(Group& group, Fault fault, const std::string& why) {
  for (const auto& channel : channels_) channel->abort_group(group.id, fault, why);
}

// The first lane's handle stands for the call. A lane that is not posted counts as ended, so that
// the call ends with those that are.
std::shared_ptr<Call> Mesh::post_lanes(Group& group, const Posting& posting) {
  const auto lanes = std::make_shared<Lanes>(posting.plan->n_lanes);
  std::shared_ptr<Call> call = first().post_lane(group.id, posting, lanes);
  if (call == nullptr)  // dropped: the first channel's group still has the reason
    return first().post(group, posting);
  Error failed = call->finished ? call->error : Error{};
  for (size_t at = 1; at < channels_.size(); ++at) {
    if (!failed) try {
        call->other_lanes.reserve(channels_.size() - 1);  // before any of them is in flight
        auto other = channels_[at]->post_lane(group.id, posting, lanes, call->serial);
        if (other != nullptr) {
          call->other_lanes.push_back(std::move(other));
          continue;
        }
        failed = {Fault::kClosed, -1, "the group was closed with this call in flight",
                  call->doing()};
      } catch (const std::bad_alloc&) {  // every group has ended
        failed = {Fault::kResource, -1, "out of memory"};
      }
    lanes->end(static_cast<uint32_t>(at), failed);
  }
  return call;
}

void Mesh::bound_out(size_t n_bytes) {
  for (const auto& channel : channels_) channel->bound_out(n_bytes / channels_.size());
}

void Mesh::serve(Group& group, const std::shared_ptr<const Plan>& plan) {
  for (size_t at = 0; at < plan->n_lanes; ++at) channels_[at]->serve(group.id, plan);
}

// Wait until living peers have acknowledged all data, for as long as a lost connection may take to
// come back, because their senders' calls have succeeded. Other queued frames get a moment to
// leave; a peer that does not read loses only the goodbye.
void Mesh::close() {
  const auto wait_while = [&](int64_t most_ns, bool (Channel::*holds)()) {
    const int64_t until = now_ns() + most_ns;
    const auto any = [&] {
      bool found = false;
      for (const auto& channel : channels_) found |= (channel.get()->*holds)();
      return found;
    };
    while (any() && now_ns() < until) usleep(200);
  };
  if (is_closing_.exchange(true)) return;
  for (const auto& channel : channels_) channel->say_goodbye();
  wait_while(patience_ns_, &Channel::owes_data);
  wait_while(500 * kMillisecond, &Channel::has_queued);
  // The first channel comes last, because callers sleep there and must see the end of every lane.
  for (size_t at = channels_.size(); at-- > 0;) channels_[at]->end_calls();
  wait_while(kSecond, &Channel::lingers);
  for (size_t at = channels_.size(); at-- > 0;) channels_[at]->end_links();
  for (const auto& channel : channels_) channel->leave_thread();
}

// NOT a thread of Python's: none can be started at the end of a program. It may outlive main().
void Mesh::close_after(int64_t ns) {
  const SignalsBlocked blocked;
  std::thread([mesh = shared_from_this(), ns] {
    pthread_setname_np(pthread_self(), "shoal-exit");
    std::this_thread::sleep_for(std::chrono::nanoseconds(ns));
    try {
      mesh->close();
    } catch (const std::exception&) {  // the end of the process closes the links
    }
  }).detach();
}

size_t Mesh::staging_peak() {
  size_t n_bytes = 0;
  for (const auto& channel : channels_) n_bytes += channel->staging_peak();
  return n_bytes;
}

std::shared_ptr<const Value> Mesh::state(int64_t patience_ns) {
  std::vector<std::shared_ptr<const Value>> states;
  for (const auto& channel : channels_) {
    states.push_back(channel->state(patience_ns));
    if (states.front() == nullptr) return nullptr;
  }
  return together(std::move(states));
}

std::shared_ptr<const Value> Mesh::take_state_at_deadline(Group& group) {
  std::vector<std::shared_ptr<const Value>> states;
  for (const auto& channel : channels_)
    states.push_back(
        channel->take_state_at_deadline(group.id, channel == channels_.front() ? &group : nullptr));
  return together(std::move(states));
}

}  // namespace shoal
