#include "transport/arena.h"

#include <linux/futex.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <new>

namespace shoal {
namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// Not FUTEX_PRIVATE: the word is shared between processes.
long futex(std::atomic<uint32_t>* word, int what, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), what, value, timeout, nullptr, 0);
}

}  // namespace

Arena::~Arena() {
  close_memory_fd();
  if (event_fd_ >= 0) ::close(event_fd_);
}

void Arena::close_memory_fd() {
  if (memory_fd_ >= 0) ::close(memory_fd_);
  memory_fd_ = -1;
}

Error Arena::create(int n_local, Arena& out) {
  out.n_local_ = n_local;
  out.n_slots_ = static_cast<uint32_t>(n_local - 1) * slot_quota(n_local);
  const size_t n_bytes = out.size();
  if (Error error =
          create_shared_memory("shoal-arena", n_bytes, out.slots_offset(), out.memory_fd_))
    return error;
  if (Error error = Mapping::map(out.memory_fd_, n_bytes, out.mapping_)) return error;
  out.event_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (out.event_fd_ < 0)
    return {Fault::kResource, -1,
            std::string("eventfd failed: ") + std::strerror(errno) +
                "; raise the limit of open files (ulimit -n)"};
  auto* header = new (out.mapping_.data()) ArenaHeader;
  header->magic = ArenaHeader::kMagic;
  header->n_local = static_cast<uint32_t>(n_local);
  header->n_slots = out.n_slots_;
  for (int local = 0; local < n_local; ++local)
    new (out.mapping_.data() + out.ring_offset(local)) RingHeader;
  for (uint32_t slot = 0; slot < out.n_slots_; ++slot)
    new (out.stamps() + slot) std::atomic<uint64_t>{0};
  return {};
}

Error Arena::open(int memory_fd, int n_local, Arena& out) {
  out.n_local_ = n_local;
  out.n_slots_ = static_cast<uint32_t>(n_local - 1) * slot_quota(n_local);
  const size_t n_bytes = out.size();
  struct stat stat{};
  if (fstat(memory_fd, &stat) != 0 || static_cast<size_t>(stat.st_size) != n_bytes)
    return {Fault::kPeerLost, -1, "handed over an arena of the wrong size"};
  if (Error error = Mapping::map(memory_fd, n_bytes, out.mapping_)) return error;
  if (out.header().magic != ArenaHeader::kMagic)
    return {Fault::kPeerLost, -1, "handed over memory that is no arena"};
  return {};
}

void Arena::ring_bell(int owner_event_fd, uint32_t n_frames, Ring how) const {
  ArenaHeader& to = header();
  // Also without a frame: a sleeper compares the count just before it sleeps.
  const uint32_t now = to.bell.fetch_add(std::max(1u, n_frames)) + std::max(1u, n_frames);
  // Before the look at who watches: a caller that leaves looks for it after it has said so.
  if (how == Ring::kAlways) to.alarm.store(1);
  const uint32_t watch = to.watch.load();
  if (watch & kCallerSleeps) {
    // Signed distance: the counter wraps.
    if (how == Ring::kCounted && static_cast<int32_t>(now - to.wake_at.load()) < 0) return;
    if (to.watch.fetch_and(~kCallerSleeps) & kCallerSleeps)
      futex(&to.bell, FUTEX_WAKE, INT_MAX, nullptr);
    return;
  }
  const bool armed = (watch & kLaneSleeps) && (to.watch.fetch_and(~kLaneSleeps) & kLaneSleeps);
  if (armed || (how == Ring::kAlways && !(watch & (kDriven | kLaneSleeps)))) {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t n = write(owner_event_fd, &one, sizeof(one));
  }
}

void Arena::wake_callers() const {
  ArenaHeader& own = header();
  own.bell.fetch_add(1);
  if (own.watch.fetch_and(~kCallerSleeps) & kCallerSleeps)
    futex(&own.bell, FUTEX_WAKE, INT_MAX, nullptr);
}

void Arena::sleep(uint32_t seen, int64_t timeout_ns) const {
  const timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  futex(&header().bell, FUTEX_WAIT, seen, &timeout);
}

}  // namespace shoal
