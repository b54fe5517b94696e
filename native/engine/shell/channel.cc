#include "engine/shell/channel.h"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <utility>

#include "base/clock.h"
#include "base/locked_within.h"
#include "engine/shell/state_reader.h"

namespace shoal {
namespace {

// Enough for the errors of a few thousand calls that fail at once.
constexpr size_t kSpareBytes = 1u << 20;
constexpr int64_t kTickNs = 100 * kMillisecond;
// Bytes a driver moves before it lets others have the lock.
constexpr size_t kTurnBytes = 1u << 20;

}  // namespace

Channel::Channel(int rank, std::vector<std::string> names, std::shared_ptr<Arena> arena,
                 int n_local, const Options& options, Place place)
    : rank_(rank),
      place_(std::move(place)),
      arena_(std::move(arena)),
      engine_(rank, std::move(names), options.engine),
      drivers_(engine_, arena_, options, n_local, [this] { return step(); }),
      served_(engine_, place_.paths.get(), place_.index),
      spare_(new std::byte[kSpareBytes]) {}

// The progress thread has dropped it already, or never had it. Do NOT call leave_thread() here:
// this may run on the progress thread.
Channel::~Channel() {
  if (closed_) return;
  say_goodbye();
  end_calls();
  end_links();
}

Error Channel::create(int rank, std::vector<std::string> names, uint64_t epoch,
                      const Bytes& job_key, std::shared_ptr<Arena> arena,
                      const std::vector<PeerPlace>& peers, const Options& options, Place place,
                      std::shared_ptr<Channel>& out) {
  std::vector<int> local = {rank};
  for (const PeerPlace& peer : peers)
    if (peer.is_local) local.push_back(peer.rank);
  std::sort(local.begin(), local.end());
  const int n_local = static_cast<int>(local.size());
  const int index = place.index;
  PathMaker* const paths = place.paths.get();
  const Site site{rank,
                  epoch,
                  job_key,
                  *arena,
                  std::move(local),
                  index,
                  paths == nullptr ? nullptr : &paths->source(static_cast<size_t>(index))};
  std::shared_ptr<Channel> channel(
      new Channel(rank, std::move(names), std::move(arena), n_local, options, std::move(place)));
  if (Error failed = channel->connect_all(site, peers)) {
    channel->closed_ = true;  // no goodbye can be sent
    return failed;
  }
  channel->serve_slots(n_local);
  Channel* raw = channel.get();
  channel->engine_.hooks.on_finished = [raw](Call& call) { raw->ended(call); };
  if (channel->place_.errors != nullptr)
    channel->engine_.hooks.on_ended = [raw](Group& group, Error& why, bool reported) {
      raw->notify_others(group, why, reported);
    };
  channel->engine_.hooks.on_deadline = [raw](Group& group) {
    group.at_deadline = raw->state_at_deadline();
  };
  if (Error error = channel->progress_thread().add(channel)) return error;
  out = std::move(channel);
  return {};
}

Error Channel::connect_all(const Site& site, const std::vector<PeerPlace>& peers) {
  const int64_t now = now_ns();
  arena_->header().heartbeat_ns.store(now);
  for (const PeerPlace& peer : peers) {
    std::unique_ptr<Link> link;
    if (Error error = connect(site, peer, link)) return error;
    const bool rings = link->rings_bell();
    engine_.set_link(peer.rank, std::move(link), now);
    if (rings) drivers_.rings().add(peer.rank);
  }
  return {};
}

void Channel::serve_slots(int n_local) {
  engine_.set_slots(Slots(arena_->slots(), arena_->stamps(), arena_->n_slots(),
                          Arena::slot_quota(n_local), engine_.size(),
                          [arena = arena_](uint32_t slot) { return arena->reserve_slot(slot); }));
}

// ---- groups and calls

Group& Channel::add_group(uint64_t id, std::vector<int> members) {
  std::lock_guard lock(mutex_);
  Group& group = engine_.add_group(id, std::move(members));
  if (closed_) end_groups();  // else nothing would end its calls
  return group;
}

void Channel::drop_group(uint64_t id) {
  std::unique_lock lock(mutex_);
  Group* group = engine_.group(id);
  if (group == nullptr) return;
  is_dropping_ = true;
  guarded([&] { engine_.drop_group(*group); });
  is_dropping_ = false;
  after_step(lock);
  progress_thread().kick();  // what the group held may let others' background calls go on
}

void Channel::abort_group(uint64_t id, Fault fault, const std::string& how) {
  end_group(id, {fault, rank_, engine_.name_of_rank(rank_) + " " + how});
}

void Channel::end_group(uint64_t id, const Error& why) {
  std::unique_lock lock(mutex_);
  Group* group = engine_.group(id);
  if (group == nullptr) return;
  guarded([&] { engine_.abort_group(*group, why, true); });
  after_step(lock);
  progress_thread().kick();  // as drop_group()
}

Error Channel::abort_of(const Group& group) {
  if (place_.errors != nullptr)
    if (Error first = place_.errors->of(group.id)) return first;
  std::lock_guard lock(mutex_);
  return group.life.why();
}

// ---- what the channels of a mesh do together

// A group ends here: the first error of any channel becomes that of all channels.
void Channel::notify_others(Group& group, Error& why, bool reported) {
  if (closed_ || is_dropping_) return;
  if (!place_.errors->report(place_.index, group.id, !reported, why, now_ns()) || reported) return;
  for (int other = 0; other < place_.errors->n_channels(); ++other)
    if (other != place_.index) ProgressThread::of(other).kick();
}

// End groups that failed in other channels and that this channel's own links have not reported.
void Channel::take_errors(int64_t now) {
  if (place_.errors == nullptr) return;
  for (const FirstErrors::News& news : place_.errors->take(place_.index, now))
    if (Group* group = engine_.group(news.group)) engine_.abort_group(*group, news.why, true);
}

// A call or a lane has ended here; the last lane counts as the call.
void Channel::ended(Call& call) {
  if (call.is_served) return;  // no caller waits for it
  if (call.lane.of != nullptr) {
    if (!call.lane.of->end(call.lane.index, call.error)) return;
    if (place_.first != nullptr) return place_.first->count_finished();
  }
  drivers_.note_end();
  n_finished_++;
}

// Called without this channel's lock, because another channel finds that the call is over. Counted
// before the doorbell rings: a caller about to sleep reads the doorbell first, and then the count.
void Channel::count_finished() {
  n_finished_++;
  drivers_.ring();
}

// ---- calls

std::shared_ptr<Call> Channel::post(Group& group, const Posting& posting) {
  std::unique_lock lock(mutex_);
  std::shared_ptr<Call> call;
  guarded([&] { call = engine_.post(group, posting); });
  return start(lock, std::move(call), posting.background);
}

std::shared_ptr<Call> Channel::post_lane(uint64_t group, const Posting& posting,
                                         std::shared_ptr<Lanes> lanes, uint64_t serial) {
  std::unique_lock lock(mutex_);
  Group* here = engine_.group(group);
  if (here == nullptr) return nullptr;
  const Lane lane{static_cast<uint32_t>(place_.index), serial, std::move(lanes)};
  std::shared_ptr<Call> call;
  guarded([&] { call = engine_.post(*here, posting, lane); });
  if (call != nullptr && call->finished) ended(*call);  // a refused call has not been counted
  return start(lock, std::move(call), posting.background || place_.first != nullptr);
}

std::shared_ptr<Call> Channel::post(Group& group, const Message& message) {
  std::unique_lock lock(mutex_);
  std::shared_ptr<Call> call;
  guarded([&] { call = engine_.post(group, message); });
  return start(lock, std::move(call), message.background);
}

bool Channel::notify(uint64_t group, int fd) {
  std::lock_guard lock(mutex_);
  Group* here = engine_.group(group);
  if (here == nullptr) return true;  // it is dropped: the caller knows
  if (!here->bell.hang(fd)) return false;
  here->bell.ring();
  return true;
}

bool Channel::has_message(uint64_t group, int from, int64_t tag) {
  std::lock_guard lock(mutex_);
  const Group* here = engine_.group(group);
  return here != nullptr && engine_.has_message(*here, from, tag);
}

// No caller waits for served calls: the progress thread starts them.
void Channel::serve(uint64_t group, std::shared_ptr<const Plan> plan) {
  std::unique_lock lock(mutex_);
  Group* here = engine_.group(group);
  if (here == nullptr) return;
  guarded([&] {
    engine_.serve(*here, std::move(plan), static_cast<uint32_t>(place_.index));
    engine_.progress(1);
  });
  after_step(lock);
  progress_thread().kick();
}

std::shared_ptr<Call> Channel::start(std::unique_lock<std::mutex>& lock, std::shared_ptr<Call> call,
                                     bool background) {
  // If there was no memory even to end the call, its deadline will end it.
  if (call == nullptr) call = engine_.last_prepared();
  if (call == nullptr) throw std::bad_alloc();  // every group has ended
  if (drivers_.has_sleepers_for_all()) guarded([&] { drivers_.rings().pump(); });
  // Send small messages now; the driver does the rest.
  guarded([&] { engine_.progress(1); });
  const bool rouse = background && !call->finished && drivers_.n_callers() == 0;
  after_step(lock);
  if (rouse) progress_thread().kick();
  return call;
}

bool Channel::step() {
  bool moved = true;
  guarded([&] {
    const bool came = drivers_.rings().pump();
    moved = engine_.progress(kTurnBytes) || came;
  });
  if (engine_.has_unflushed()) progress_thread().kick();  // it serves the sockets
  return moved;
}

// Memory ran out halfway through some work, so the engine's state cannot be trusted. Fail all
// groups, here and on every rank that can still be notified.
template <class Work>
void Channel::guarded(Work work) {
  try {
    work();
  } catch (const std::bad_alloc&) {
    out_of_memory();
  }
}

void Channel::out_of_memory() {
  spare_.reset();
  try {
    engine_.end_groups({Fault::kResource, rank_,
                        engine_.name_of_rank(rank_) +
                            " ran out of memory; give the job more, or lower SHOAL_STAGING_BYTES"},
                       true);
  } catch (const std::bad_alloc&) {  // ranks that could not be notified wait for their deadline
  }
}

// Wake sleeping callers if a call has finished, which may be theirs, or if there is work.
void Channel::after_step(std::unique_lock<std::mutex>& lock) {
  const bool rings = drivers_.are_to_be_rung();
  const bool is_unflushed = engine_.has_unflushed();
  lock.unlock();
  if (rings) drivers_.ring();
  if (is_unflushed) progress_thread().kick();  // it serves the sockets
}

void Channel::drive(int64_t timeout_ns, const Call* call, const std::function<bool()>& is_over) {
  std::unique_lock lock(mutex_);
  if (drivers_.leave_it_to_thread()) {
    progress_thread().kick();
    return drivers_.await(lock, timeout_ns, is_over);
  }
  const bool is_left = drivers_.drive(lock, timeout_ns, call, is_over);
  after_step(lock);
  if (is_left) progress_thread().kick();
}

bool Channel::wait(Call& call, int64_t timeout_ns) {
  if (call.is_over()) return true;
  drive(timeout_ns, &call, [&] { return call.is_over(); });
  return call.is_over();
}

int64_t Channel::wait_finished(int64_t seen, int64_t timeout_ns) {
  drive(timeout_ns, nullptr, [this, seen] { return n_finished_ != seen || closed_; });
  return n_finished_;
}

// ---- the progress thread's side

std::vector<Watched> Channel::watched() {
  std::lock_guard lock(mutex_);
  std::vector<Watched> all = {{arena_->doorbell_socket().fd(), kDoorbell}};
  if (place_.paths != nullptr && place_.first == nullptr)
    all.push_back({place_.paths->fd(), kPaths});
  for (int peer = 0; peer < engine_.size(); ++peer) {
    const Link* link = engine_.link(peer);
    if (link == nullptr) continue;
    for (const int fd : link->fds()) all.push_back({fd, peer});
  }
  return all;
}

void Channel::on_event(int peer, bool ended) {
  if (peer == kPaths) return make_paths();
  std::unique_lock lock(mutex_);
  if (peer == kDoorbell) {
    Drivers::wakeups().thread_rung++;
    guarded([&] { arena_->take_notes(true); });
  }
  if (closed_ || peer < 0) return;
  guarded([&] {
    served_.serve(peer, ended);
    engine_.progress(kTurnBytes);
  });
  after_step(lock);
}

// Make connections for all channels. No channel's lock is held, so strangers cost time on the first
// progress thread only.
void Channel::make_paths() {
  place_.paths->step();
  for (size_t other = 1; other < place_.paths->n_channels(); ++other)
    if (place_.paths->calls(other)) ProgressThread::of(static_cast<int>(other)).kick();
  std::unique_lock lock(mutex_);
  if (closed_) return;
  guarded([&] {
    take_paths();
    engine_.progress(kTurnBytes);
  });
  after_step(lock);
}

void Channel::take_paths() {
  served_.take_paths(
      [&](int fd, int peer) { return !progress_thread().watch_also(this, {fd, peer}); });
}

bool Channel::turn(int64_t now) {
  std::unique_lock lock(mutex_);
  if (closed_) return false;
  bool more = false;
  if (place_.errors != nullptr && place_.errors->has_news(place_.index))
    guarded([&] { take_errors(now); });
  const bool is_called = served_.are_called();
  if (is_called) guarded([&] { take_paths(); });
  if (drivers_.n_callers() == 0 && drivers_.call_for_thread(now)) more = step();
  const bool has_unread = served_.has_unread();
  guarded([&] {
    served_.serve_unread();
    if (is_called || has_unread || engine_.has_unflushed()) engine_.progress(kTurnBytes);
  });
  guarded([&] {  // also if memory ran out above, else peers would take this rank for dead
    if (now >= next_tick_ns_) tick(now);
    served_.look(now, is_called);
  });
  more |= has_unread || engine_.has_unflushed();
  after_step(lock);
  return more;
}

void Channel::tick(int64_t now) {
  next_tick_ns_ = now + kTickNs;
  arena_->header().heartbeat_ns.store(now);
  for (int peer = 0; peer < engine_.size(); ++peer)
    if (Link* link = engine_.link(peer)) engine_.alive_at(peer, std::min(link->tick(), now));
  // Use every frame that has arrived before a deadline blames its sender.
  if (engine_.is_overdue(now)) step();
  engine_.tick(now);
  take_errors(now);
  drivers_.settle_suspicion();
}

bool Channel::may_sleep() {
  std::lock_guard lock(mutex_);
  if (closed_) return true;
  if (engine_.has_unflushed()) return false;
  if (served_.are_called()) return false;
  if (place_.errors != nullptr && place_.errors->has_news(place_.index)) return false;
  return drivers_.may_thread_sleep();
}

size_t Channel::staging_peak() {
  std::lock_guard lock(mutex_);
  return engine_.staging().peak();
}

std::shared_ptr<const Value> Channel::read_state() {
  Value state = StateReader(engine_, now_ns()).read();
  auto& fields = std::get<Fields>(state.is);
  fields.emplace_back("n_threads_waiting", drivers_.n_callers());
  fields.emplace_back("is_closed", closed_);
  fields.emplace_back("channel", place_.index);
  return std::make_shared<const Value>(std::move(state));
}

// Groups that end together share one state: that of just before the first of them ended.
std::shared_ptr<const Value> Channel::state_at_deadline() {
  auto state = last_state_.lock();
  if (state != nullptr && now_ns() - last_state_ns_ < kTickNs) return state;
  try {
    last_state_ = state = read_state();
  } catch (const std::bad_alloc&) {  // the group ends all the same
  }
  last_state_ns_ = now_ns();
  return state;
}

std::shared_ptr<const Value> Channel::state(int64_t patience_ns) {
  if (forsaken()) return nullptr;
  const auto lock = locked_within(mutex_, patience_ns);
  return lock ? read_state() : nullptr;
}

std::shared_ptr<const Value> Channel::take_state_at_deadline(uint64_t id, Group* group) {
  if (forsaken()) return nullptr;
  std::lock_guard lock(mutex_);
  if (group == nullptr) group = engine_.group(id);
  return group == nullptr ? nullptr : std::exchange(group->at_deadline, nullptr);
}

void Channel::forsake() {
  forsaken_.store(true);
  arena_->forsake();
  for (int peer = 0; peer < engine_.size(); ++peer)
    if (Link* link = engine_.link(peer)) link->forsake();
  if (place_.paths != nullptr && place_.first == nullptr) place_.paths->forsake();
}

void Channel::say_goodbye() {
  if (forsaken()) return;
  std::lock_guard lock(mutex_);
  if (!closed_) guarded([&] { engine_.say_goodbye(); });
}

bool Channel::owes_data() { return pumps_while(&Engine::owes_data); }

bool Channel::has_queued() { return pumps_while(&Engine::has_queued); }

bool Channel::pumps_while(bool (Engine::*holds)() const) {
  if (forsaken()) return false;
  std::lock_guard lock(mutex_);
  if (closed_ || !(engine_.*holds)()) return false;
  guarded([&] { engine_.pump_all(); });
  return true;
}

void Channel::end_calls() {
  if (forsaken()) return;
  std::lock_guard lock(mutex_);
  if (std::exchange(closed_, true)) return;
  end_groups();
  drivers_.ring();  // NOT only in end_links(), which waits for peers that linger
}

void Channel::end_groups() {
  guarded([&] {
    engine_.end_groups({Fault::kClosed, -1, "the group was closed with this call in flight"},
                       false);
  });
}

bool Channel::lingers() {
  if (forsaken()) return false;
  std::lock_guard lock(mutex_);
  return engine_.lingers();
}

void Channel::end_links() {
  if (forsaken()) return;
  std::lock_guard lock(mutex_);
  engine_.close();
  if (place_.paths != nullptr && place_.first == nullptr) place_.paths->close();
  arena_->close_memory_fd();
  drivers_.ring();
}

void Channel::leave_thread() {
  if (!forsaken()) progress_thread().remove(this);
}

}  // namespace shoal
