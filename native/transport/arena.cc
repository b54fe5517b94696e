#include "transport/arena.h"

#include <linux/futex.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <new>
#include <utility>

namespace shoal {
namespace {

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

// The most notes and rings that the progress thread reads in one turn. A caller that looks for a
// note reads all that its mates have sent, which is no more than a queue holds
// (net.unix.max_dgram_qlen) unless they never stop.
constexpr int kMostInTurn = 64, kMostAtAll = 1 << 16;
constexpr size_t kMostRegions = 1u << 16;  // of one mate

// Not FUTEX_PRIVATE: the word is shared between processes.
long futex(std::atomic<uint32_t>* word, int what, uint32_t value, const timespec* timeout) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), what, value, timeout, nullptr, 0);
}

}  // namespace

// ---- any arena

void ArenaView::ring_bell(const DoorbellSocket& by, uint32_t n_frames, Ring how) const {
  ArenaHeader& to = header();
  // Count even without a frame, because a sleeper compares the count just before it sleeps.
  const uint32_t now = to.doorbell.fetch_add(std::max(1u, n_frames)) + std::max(1u, n_frames);
  // Raise the alarm before reading `watch`: a caller that leaves clears its bit, then checks the
  // alarm.
  const bool is_first = how == Ring::kAlways && to.alarm.exchange(1) == 0;
  const uint32_t watch = to.watch.load();
  if (watch & kCallerSleeps) {
    // Signed distance: the counter wraps.
    if (how == Ring::kCounted && static_cast<int32_t>(now - to.wake_at.load()) < 0) return;
    if (to.watch.fetch_and(~kCallerSleeps) & kCallerSleeps)
      futex(&to.doorbell, FUTEX_WAKE, INT_MAX, nullptr);
    return;
  }
  const bool armed =
      (watch & kThreadSleeps) && (to.watch.fetch_and(~kThreadSleeps) & kThreadSleeps);
  // The process that raised the alarm rings for all that find it raised, so that few rings are
  // sent.
  if (armed || (is_first && !(watch & (kDriven | kThreadSleeps)))) by.ring(to.doorbell_address);
}

// ---- our own

Arena::~Arena() {
  mark_.clear();
  close_memory_fd();
}

void Arena::close_memory_fd() {
  if (memory_fd_ >= 0) ::close(memory_fd_);
  memory_fd_ = -1;
}

void Arena::forsake() {
  doorbell_socket_.close();
  close_memory_fd();
}

Error Arena::create(int n_local, Arena& out) {
  int fd = -1;
  const size_t n_bytes = static_cast<size_t>(n_local) * ArenaView(nullptr, n_local).n_bytes();
  if (Error error = create_shared_memory("shoal-arena", n_bytes, fd)) return error;
  return enter(fd, n_local, 0, out);
}

Error Arena::enter(int memory_fd, int n_local, int local, Arena& out) {
  out.memory_fd_ = memory_fd;
  out.local_ = local;
  static_cast<ArenaView&>(out) = ArenaView(nullptr, n_local);
  out.regions_.resize(static_cast<size_t>(n_local));
  out.n_missed_.resize(static_cast<size_t>(n_local));
  const size_t n_bytes = static_cast<size_t>(n_local) * out.n_bytes();
  struct stat stat{};
  if (fstat(memory_fd, &stat) != 0 || static_cast<size_t>(stat.st_size) != n_bytes)
    return {Fault::kPeerLost, -1, "received shared memory of the wrong size"};
  if (Error error = out.reserve()) return error;
  if (Error error = Mapping::map(memory_fd, n_bytes, out.mapping_)) return error;
  out.base_ = out.mapping_.data() + out.offset();
  if (Error error = out.doorbell_socket_.open()) return error;
  out.begin();
  return out.mark_.set(memory_fd, out.offset());
}

// Reserve all memory but that of slots, for which it only checks that there is enough.
Error Arena::reserve() {
  if (Error error = check_shared_memory_fits(n_bytes())) return error;
  return reserve_shared_memory(memory_fd_, offset(), slots_offset_);
}

void Arena::begin() {
  auto* own = new (base_) ArenaHeader;
  own->magic = ArenaHeader::kMagic;
  own->n_local = static_cast<uint32_t>(n_local_);
  own->doorbell_address = doorbell_socket_.address();
  for (int from = 0; from < n_local_; ++from) new (&ring(from)) RingHeader;
  for (uint32_t slot = 0; slot < n_slots(); ++slot) new (stamps() + slot) std::atomic<uint64_t>{0};
}

Error Arena::mate(int local, ArenaView& out) const {
  if (local < 0 || local >= n_local_) return {Fault::kInternal, -1, "no such arena"};
  out = ArenaView(mapping_.data() + static_cast<size_t>(local) * n_bytes(), n_local_);
  if (out.header().magic == ArenaHeader::kMagic) return {};
  return {Fault::kPeerLost, -1, "has not entered the memory that the ranks of its host share"};
}

void Arena::wake_callers() const {
  ArenaHeader& own = header();
  own.doorbell.fetch_add(1);
  if (own.watch.fetch_and(~kCallerSleeps) & kCallerSleeps)
    futex(&own.doorbell, FUTEX_WAKE, INT_MAX, nullptr);
}

void Arena::sleep(uint32_t seen, int64_t timeout_ns) const {
  const timespec timeout{timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  futex(&header().doorbell, FUTEX_WAIT, seen, &timeout);
}

// ---- notes

void Arena::take_notes(bool is_progress_thread) {
  bool is_rung = false;
  for (int n = 0; n < (is_progress_thread ? kMostInTurn : kMostAtAll); ++n) {
    Note note;
    int fd = -1;
    const auto took = doorbell_socket_.take(note, fd);
    if (took == DoorbellSocket::Took::kNothing) break;
    is_rung |= took == DoorbellSocket::Took::kRing;
    if (took == DoorbellSocket::Took::kNote) take(note, fd);
  }
  // The ring was meant for the progress thread, which may sleep: pass it on.
  if (is_rung && !is_progress_thread) doorbell_socket_.ring(doorbell_socket_.address());
}

// Check everything that a host-mate writes.
void Arena::take(const Note& note, int fd) {
  const uint32_t from = note.header.flow;
  const Place& place = note.place;
  struct stat stat{};
  Mapping mapping;
  if (from < regions_.size() && note.header.type == FrameType::kRelease)
    n_missed_[from] -= regions_[from].erase(place.region) == 0 && n_missed_[from] > 0;
  // -1: this process had no descriptor left. A region that cannot be mapped is kept empty, and the
  // call that needs it fails.
  const bool fits =
      from < regions_.size() && note.header.type == FrameType::kRegion &&
      regions_[from].size() < kMostRegions &&
      (fd < 0 || (fstat(fd, &stat) == 0 && static_cast<uint64_t>(stat.st_size) == place.offset));
  bool is_kept = false;
  try {
    if (fits && fd >= 0) (void)Mapping::map(fd, place.offset, mapping);
    if (fits) regions_[from].try_emplace(place.region, std::move(mapping));
    is_kept = fits;
  } catch (const std::bad_alloc&) {
  }
  if (fd >= 0) ::close(fd);
  if (from < regions_.size() && note.header.type == FrameType::kRegion && !is_kept)
    ++n_missed_[from];
}

const Mapping* Arena::region(int local, uint32_t id) const {
  const auto& theirs = regions_[static_cast<size_t>(local)];
  const auto found = theirs.find(id);
  return found == theirs.end() ? nullptr : &found->second;
}

}  // namespace shoal
