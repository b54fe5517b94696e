#include "engine/mesh.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "base/clock.h"
#include "base/cores.h"
#include "base/locked_within.h"
#include "engine/lane.h"
#include "engine/state_reader.h"

namespace shoal {
namespace {

// Enough for the words of a few thousand calls that fail at once.
constexpr size_t kSpareBytes = 1u << 20;
constexpr int64_t kTickNs = 100 * kMillisecond;
// While there is always something to do, a caller looks at signals this often.
constexpr int64_t kLookNs = 100 * kMillisecond;
// Bytes a driver moves before it lets others have the lock.
constexpr size_t kTurnBytes = 1u << 20;
constexpr int64_t kWatchPathsNs = 20 * kMillisecond;
// From other hosts: 200 us at 10 Gbit/s, as long as a caller polls by default.
constexpr uint64_t kSpinBytes = 256u << 10;

}  // namespace

Mesh::Mesh(int rank, std::vector<std::string> names, const Options& options)
    : rank_(rank),
      options_(options),
      engine_(rank, std::move(names), options.engine),
      spare_(new std::byte[kSpareBytes]) {}

Mesh::~Mesh() { close(); }

Error Mesh::create(int rank, std::vector<std::string> names, uint64_t epoch, Bytes job_key,
                   std::shared_ptr<Arena> arena, const std::vector<PeerSockets>& peers,
                   const Options& options, std::shared_ptr<Mesh>& out,
                   std::unique_ptr<PathMaker> paths) {
  const size_t size = names.size();
  std::shared_ptr<Mesh> mesh(new Mesh(rank, std::move(names), options));
  mesh->paths_ = std::move(paths);
  mesh->arena_ = std::move(arena);

  std::vector<int> local = {rank};
  for (const PeerSockets& peer : peers)
    if (peer.is_local) local.push_back(peer.rank);
  std::sort(local.begin(), local.end());
  const int n_local = static_cast<int>(local.size());
  const Site site{rank, epoch, job_key, *mesh->arena_, std::move(local), mesh->paths_.get()};
  const int64_t now = now_ns();
  mesh->arena_->header().heartbeat_ns.store(now);
  Error failed;
  for (const PeerSockets& peer : peers) {
    std::unique_ptr<Link> link;
    if (Error error = connect(site, peer, link); error && !failed) failed = error;
    if (link == nullptr) continue;
    if (link->rings_bell()) {
      mesh->bell_links_.push_back(link.get());
      mesh->bell_peers_.push_back(peer.rank);
    }
    mesh->engine_.set_link(peer.rank, std::move(link), now);
  }
  if (failed) {
    mesh->closed_ = true;  // there is no way to say goodbye
    return failed;
  }
  mesh->engine_.set_slots(
      Slots(mesh->arena_->slots(), mesh->arena_->stamps(), mesh->arena_->n_slots(),
            Arena::slot_quota(n_local), static_cast<int>(size),
            [arena = mesh->arena_](uint32_t slot) { return arena->reserve_slot(slot); }));
  mesh->oversubscribed_ = n_local > usable_cores();
  Mesh* raw = mesh.get();
  mesh->engine_.on_finished = [raw](Collective&) {
    raw->finished_some_ = true;
    raw->n_finished_++;
  };
  mesh->engine_.on_deadline = [raw](Group& group) { group.at_deadline = raw->state_at_deadline(); };
  if (Error error = Lane::of_process().add(mesh)) return error;
  out = std::move(mesh);
  return {};
}

// ---- groups and calls

Group& Mesh::add_group(uint64_t id, std::vector<int> members) {
  std::lock_guard lock(mutex_);
  return engine_.add_group(id, std::move(members));
}

void Mesh::drop_group(Group& group) {
  std::unique_lock lock(mutex_);
  guarded([&] { engine_.drop_group(group); });
  after_step(lock);
}

void Mesh::abort_group(Group& group, const std::string& why) {
  std::unique_lock lock(mutex_);
  guarded([&] {
    engine_.abort_group(
        group, {Fault::kClosed, rank_, engine_.name_of_rank(rank_) + " aborted the group: " + why},
        true);
  });
  after_step(lock);
}

Error Mesh::poison_of(Group& group) {
  std::lock_guard lock(mutex_);
  return group.life.why();
}

std::shared_ptr<Collective> Mesh::post(Group& group, std::shared_ptr<const Plan> plan, uint64_t key,
                                       const std::vector<std::vector<std::byte*>>& memory,
                                       int64_t timeout_ns, bool background) {
  std::unique_lock lock(mutex_);
  const int64_t deadline = now_ns() + timeout_ns;
  std::shared_ptr<Collective> call;
  guarded([&] { call = engine_.post(group, std::move(plan), key, memory, deadline); });
  return start(lock, std::move(call), background);
}

std::shared_ptr<Collective> Mesh::post_message(Group& group, std::shared_ptr<const Plan> plan,
                                               bool sends, int peer, int64_t tag, std::byte* data,
                                               int64_t timeout_ns, bool background) {
  std::unique_lock lock(mutex_);
  const int64_t deadline = now_ns() + timeout_ns;
  std::shared_ptr<Collective> call;
  guarded([&] {
    call = sends ? engine_.post_send(group, std::move(plan), peer, tag, data, deadline)
                 : engine_.post_recv(group, std::move(plan), peer, tag, data, deadline);
  });
  return start(lock, std::move(call), background);
}

std::shared_ptr<Collective> Mesh::start(std::unique_lock<std::mutex>& lock,
                                        std::shared_ptr<Collective> call, bool background) {
  if (call == nullptr) throw std::bad_alloc();  // every group has ended
  if (n_sleeping_ > 0) {
    // They sleep until all of another call has come: from here on every frame may matter.
    arena_->header().wake_at.store(arena_->header().bell.load());
    guarded([&] { pump_rings(); });
  }
  // Small messages leave at once; the rest is for whoever drives.
  guarded([&] { engine_.progress(1); });
  const bool rouse = background && !call->finished && n_callers_ == 0;
  after_step(lock);
  if (rouse) Lane::of_process().kick();
  return call;
}

bool Mesh::pump_rings() {
  bool moved = false;
  for (size_t at = 0; at < bell_links_.size(); ++at) {
    if (!is_bell_link(at)) continue;  // it is gone
    Link& link = *bell_links_[at];
    if (link.has_inbound() || link.has_queued()) moved |= link.pump(engine_);
  }
  return moved;
}

bool Mesh::has_inbound() const {
  for (size_t at = 0; at < bell_links_.size(); ++at)
    if (is_bell_link(at) && bell_links_[at]->has_inbound()) return true;
  return false;
}

bool Mesh::step() {
  bool moved = true;
  guarded([&] {
    const bool came = pump_rings();
    moved = engine_.progress(kTurnBytes) || came;
  });
  if (engine_.has_unflushed()) Lane::of_process().kick();  // sockets are its own
  return moved;
}

// Memory ran out in the middle of something: what the engine holds cannot be trusted any more. All
// groups end, here and on every rank that still hears of it.
template <class Work>
void Mesh::guarded(Work work) {
  try {
    work();
  } catch (const std::bad_alloc&) {
    out_of_memory();
  }
}

void Mesh::out_of_memory() {
  spare_.reset();
  try {
    engine_.end_groups({Fault::kResource, rank_,
                        engine_.name_of_rank(rank_) +
                            " ran out of memory; give the job more, or lower SHOAL_STAGING_BYTES"},
                       true);
  } catch (const std::bad_alloc&) {  // even so: those that could not be told wait for a deadline
  }
}

// Callers who sleep hear that a call is finished, which may be theirs, or that there is work.
void Mesh::wake_sleepers() {
  if (finished_some_ && n_sleeping_ > 0) arena_->wake_callers();
  finished_some_ = false;
}

void Mesh::after_step(std::unique_lock<std::mutex>& lock) {
  const bool wake = (finished_some_ || engine_.has_work()) && n_callers_ > 0;
  const bool is_unflushed = engine_.has_unflushed();
  finished_some_ = false;
  lock.unlock();
  if (wake) arena_->wake_callers();
  if (is_unflushed) Lane::of_process().kick();  // sockets are the lane's
}

bool Mesh::wait(Collective& call, int64_t timeout_ns) {
  if (call.finished.load(std::memory_order_acquire)) return true;
  std::unique_lock lock(mutex_);
  drive(lock, timeout_ns, &call, [&] { return call.finished.load(); });
  return call.finished;
}

int64_t Mesh::wait_finished(int64_t seen, int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  drive(lock, timeout_ns, nullptr, [&] { return n_finished_ != seen || closed_; });
  std::lock_guard again(mutex_);
  return n_finished_;
}

// The life of a caller that waits. Lets the lock go.
template <class Done>
void Mesh::drive(std::unique_lock<std::mutex>& lock, int64_t timeout_ns, const Collective* call,
                 Done done) {
  int64_t now = now_ns();
  const int64_t deadline = now + timeout_ns;
  // What the wire takes longer for is not worth a core.
  const bool is_long = call != nullptr && call->n_far_bytes > kSpinBytes;
  const int64_t spin_ns = is_long ? 0 : options_.spin_ns;
  int64_t spin_until = now + spin_ns;
  ArenaHeader& own = arena_->header();
  if (n_callers_++ == 0) own.watch.store(kDriven, std::memory_order_release);
  const int64_t look_at = now + kLookNs;
  for (bool quiet = false; !done() && !quiet;) {
    const bool moved = step();
    if (moved) wake_sleepers();
    now = now_ns();
    if (done() || now >= deadline || (moved && now >= look_at)) break;
    if (moved) {
      // Let a poster or the lane in between turns.
      lock.unlock();
      lock.lock();
      spin_until = now + spin_ns;
    } else if (now < spin_until) {
      lock.unlock();
      if (!oversubscribed_)
        for (int i = 0; i < 16; ++i) relax();
      // Whoever is to bring the next frame may wait for this very core, also where there are enough
      // of them: the kernel likes to put a woken rank beside the one that woke it.
      sched_yield();
      lock.lock();
    } else {
      quiet = !sleep_until_rung(lock, call, deadline);
      spin_until = now_ns() + spin_ns;
    }
  }
  if (--n_callers_ == 0) own.watch.exchange(0);
  // What came in the last moment was not announced to the lane: it seemed to be looked after here.
  const bool left = n_callers_ == 0 && (engine_.n_in_flight() > 0 || own.alarm.load() != 0);
  after_step(lock);
  if (left) Lane::of_process().kick();
}

// Sleeps on the bell. False when it did not ring: time to look at signals and deadlines.
bool Mesh::sleep_until_rung(std::unique_lock<std::mutex>& lock, const Collective* call,
                            int64_t deadline) {
  ArenaHeader& own = arena_->header();
  const uint32_t seen = own.bell.load();
  own.wake_at.store(seen + (call == nullptr ? 1 : engine_.frames_awaited(*call)));
  n_sleeping_++;
  own.watch.fetch_or(kCallerSleeps);
  // A frame that came between the last look and the arming has moved the bell, or is seen here.
  bool came = own.bell.load() != seen || has_inbound();
  if (!came) {
    const int64_t bound = std::min(deadline - now_ns(), options_.backstop_ns);
    lock.unlock();
    if (bound > 0) arena_->sleep(seen, bound);
    lock.lock();
    came = own.bell.load() != seen;
    (came ? wakeups().callers_rung : wakeups().callers_timed)++;
    if (!came && (has_inbound() || engine_.has_work() || finished_some_)) suspect();
  }
  // NOT whenever one wakes: others sleep on.
  if (--n_sleeping_ == 0) own.watch.fetch_and(~kCallerSleeps);
  return came;
}

void Mesh::suspect() {
  suspects_ = true;
  suspect_bell_ = arena_->header().bell.load();
}

void Mesh::settle_suspicion() {
  if (suspects_ && arena_->header().bell.load() == suspect_bell_) wakeups().late++;
  suspects_ = false;
}

// ---- the lane's side

std::vector<Mesh::Watched> Mesh::watched() {
  std::lock_guard lock(mutex_);
  std::vector<Watched> all = {{arena_->bell_socket().fd(), kBell}};
  if (paths_ != nullptr) all.push_back({paths_->fd(), kPaths});
  for (int peer = 0; peer < engine_.size(); ++peer) {
    const Link* link = engine_.link(peer);
    if (link == nullptr) continue;
    for (const int fd : link->fds()) all.push_back({fd, peer});
  }
  return all;
}

// Events are edge-triggered: what is left in a socket is for the next turn, as nobody tells again.
void Mesh::serve(int peer, bool ended) {
  Link* link = engine_.link(peer);
  if (link == nullptr) return;
  link->on_event(engine_, ended);
  const bool listed = std::find(unread_.begin(), unread_.end(), peer) != unread_.end();
  if (!link->is_drained() && !listed) unread_.push_back(peer);
}

void Mesh::on_event(int peer, bool ended) {
  if (peer == kPaths) return make_paths();
  std::unique_lock lock(mutex_);
  if (peer == kBell) {
    wakeups().lane_rung++;
    guarded([&] { arena_->take_notes(true); });
  }
  if (closed_ || peer < 0) return;
  guarded([&] {
    serve(peer, ended);
    engine_.progress(kTurnBytes);
  });
  after_step(lock);
}

// Strangers cost the lane time, and nobody else: they are dealt with without the lock.
void Mesh::make_paths() {
  paths_->step();
  std::unique_lock lock(mutex_);
  if (closed_) return;
  guarded([&] {
    const auto watch = [&](int fd, int peer) {
      return !Lane::of_process().watch_also(this, {fd, peer});
    };
    for (const int peer : paths_->tell_links(engine_, watch)) serve(peer, false);
    engine_.progress(kTurnBytes);
  });
  after_step(lock);
}

void Mesh::watch_paths(int64_t now) {
  bool any = false;
  for (int peer = 0; peer < engine_.size(); ++peer) {
    Link* link = engine_.link(peer);
    if (link == nullptr || !link->is_watchful()) continue;
    link->look(engine_, now);
    any = true;
  }
  watch_paths_ns_ = now + kWatchPathsNs;
  if (any) paths_->wake_at(watch_paths_ns_);
}

bool Mesh::turn(int64_t now) {
  std::unique_lock lock(mutex_);
  if (closed_) return false;
  bool more = false;
  if (n_callers_ == 0 && is_called_for(now)) more = step();
  const std::vector<int> unread = std::move(unread_);
  unread_.clear();
  more |= !unread.empty();
  guarded([&] {
    for (const int peer : unread) serve(peer, false);
    if (!unread.empty() || engine_.has_unflushed()) engine_.progress(kTurnBytes);
    if (now >= next_tick_ns_) tick(now);
    if (paths_ != nullptr && now >= watch_paths_ns_) watch_paths(now);
  });
  more |= engine_.has_unflushed();
  after_step(lock);
  return more;
}

void Mesh::tick(int64_t now) {
  next_tick_ns_ = now + kTickNs;
  arena_->header().heartbeat_ns.store(now);
  for (int peer = 0; peer < engine_.size(); ++peer)
    if (Link* link = engine_.link(peer)) engine_.heard_from(peer, link->tick());
  // Who is named as late must not have words here that nobody was woken for: they were not all.
  if (engine_.is_overdue(now)) step();
  engine_.tick(now);
  settle_suspicion();
}

// Whether the lane has a reason to look for work: somebody told it of some, there is some that it
// knows of, or it has not looked for very long.
bool Mesh::is_called_for(int64_t now) {
  ArenaHeader& own = arena_->header();
  const bool is_armed = (own.watch.load() & kLaneSleeps) != 0;
  if (own.alarm.load() != 0 && own.alarm.exchange(0) != 0) return true;
  if (!is_armed || engine_.has_work()) return true;
  if (now < next_backstop_ns_) return false;
  next_backstop_ns_ = now + options_.backstop_ns;
  if (engine_.n_in_flight() > 0 && has_inbound()) suspect();
  return true;
}

bool Mesh::may_sleep() {
  std::lock_guard lock(mutex_);
  if (closed_) return true;
  if (engine_.has_unflushed()) return false;
  if (n_callers_ > 0) return true;
  arena_->header().watch.fetch_or(kLaneSleeps);
  if (!has_inbound() && !engine_.has_work()) return true;
  arena_->header().watch.fetch_and(~kLaneSleeps);
  return false;
}

Mesh::Wakeups& Mesh::wakeups() {
  static Wakeups counts;
  return counts;
}

size_t Mesh::staging_peak() {
  std::lock_guard lock(mutex_);
  return engine_.staging().peak();
}

std::shared_ptr<const Value> Mesh::read_state() {
  Value told = StateReader(engine_, now_ns()).read();
  auto& fields = std::get<Fields>(told.is);
  fields.emplace_back("n_threads_waiting", n_callers_);
  fields.emplace_back("is_closed", closed_);
  return std::make_shared<const Value>(std::move(told));
}

// Groups that end together tell the same: all that was in flight before the first of them ended.
std::shared_ptr<const Value> Mesh::state_at_deadline() {
  auto state = last_state_.lock();
  if (state != nullptr && now_ns() - last_state_ns_ < kTickNs) return state;
  try {
    last_state_ = state = read_state();
  } catch (const std::bad_alloc&) {  // the group ends all the same
  }
  last_state_ns_ = now_ns();
  return state;
}

std::shared_ptr<const Value> Mesh::state(int64_t patience_ns) {
  if (forsaken()) return nullptr;
  const auto lock = locked_within(mutex_, patience_ns);
  return lock ? read_state() : nullptr;
}

std::shared_ptr<const Value> Mesh::take_state_at_deadline(Group& group) {
  if (forsaken()) return nullptr;
  std::lock_guard lock(mutex_);
  return std::exchange(group.at_deadline, nullptr);
}

void Mesh::forsake() {
  forsaken_.store(true);
  arena_->forsake();
  for (int peer = 0; peer < engine_.size(); ++peer)
    if (Link* link = engine_.link(peer)) link->forsake();
  if (paths_ != nullptr) paths_->forsake();
}

void Mesh::close() {
  if (forsaken()) return;
  {
    std::unique_lock lock(mutex_);
    if (closed_) return;
    guarded([&] { engine_.say_goodbye(); });
    // What is queued gets a moment to leave; a peer that does not read loses the goodbye only.
    const int64_t deadline = now_ns() + 500 * kMillisecond;
    while (engine_.has_queued() && now_ns() < deadline) {
      guarded([&] { engine_.pump_all(); });
      lock.unlock();
      usleep(200);
      lock.lock();
    }
    closed_ = true;
    guarded([&] {
      engine_.end_groups({Fault::kClosed, -1, "the group was closed with this call in flight"},
                         false);
    });
    const int64_t lingers_until = now_ns() + kSecond;
    while (engine_.lingers() && now_ns() < lingers_until) {
      lock.unlock();
      usleep(200);
      lock.lock();
    }
    engine_.close();
    if (paths_ != nullptr) paths_->close();
    arena_->close_memory_fd();
    lock.unlock();
    arena_->wake_callers();
  }
  Lane::of_process().remove(this);
}

}  // namespace shoal
