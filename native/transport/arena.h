// The memory shared by the processes of a host, in which each has an arena: a doorbell, a ring of
// frames from each of the others, and slots.
//
//   arena of local 0: [ArenaHeader | stamps | ring from local 0 | ring from local 1 | ... | slots]
//   arena of local 1: ...
//
// The owner reads its rings and fills its slots; peer i writes ring i and reads slots and their
// stamps (slots.h). An owner reserves all memory of its arena but that of the slots when it enters,
// that of a slot when it is first used.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/death_mark.h"
#include "base/page.h"
#include "base/shared_memory.h"
#include "transport/doorbell_socket.h"
#include "transport/frame.h"
#include "transport/slots.h"

namespace shoal {

// Which threads watch an arena; bits of ArenaHeader::watch.
inline constexpr uint32_t kCallerSleeps = 1;  // on the futex
inline constexpr uint32_t kThreadSleeps = 2;  // in epoll, woken by the doorbell's socket
inline constexpr uint32_t kDriven = 4;        // some caller is in wait(), asleep or not

// Which thread a doorbell wakes.
enum class Ring : uint8_t {
  kCounted,  // any sleeper; a caller only once all frames it waits for have come
  kNow,      // any sleeper
  kAlways,   // the progress thread if nobody drives or sleeps: it must be looked at even between
             // calls
};

struct ArenaHeader {
  static constexpr uint64_t kMagic = 0x32616e6572616873;  // "sharena2"

  std::atomic<uint32_t> life{0};  // death_mark.h; the first word of a page
  uint32_t n_local = 0;
  uint64_t magic = 0;
  std::atomic<int64_t> heartbeat_ns{0};  // polled by others ten times a second, in one line
  DoorbellAddress doorbell_address;
  alignas(64) std::atomic<uint32_t> doorbell{0};  // counts arrived frames; the futex word
  std::atomic<uint32_t> watch{0};
  std::atomic<uint32_t> wake_at{0};  // a caller need not wake before this count
  std::atomic<uint32_t> alarm{0};    // a frame arrived that cannot wait for the next call
};
static_assert(offsetof(ArenaHeader, doorbell) == 64);

struct RingHeader {
  alignas(64) std::atomic<uint64_t> head{0};  // bytes ever written, by the producer
  std::atomic<uint32_t> is_over{0};  // no more is written: the producer has closed its link
  alignas(64) std::atomic<uint64_t> tail{0};  // bytes ever read, by the consumer
  // The producer found the ring full: the reader must ring the producer's doorbell.
  std::atomic<uint32_t> is_full{0};
};

// An arena as any process of the host sees it.
class ArenaView {
 public:
  // Slots each host-mate may hold at a time: the depth of the pipeline through private memory.
  // Every exhausted pipeline is a context switch where ranks outnumber cores; every slot is memory
  // of each of the n_local processes that map it.
  static uint32_t slot_quota(int n_local) {
    return n_local < 2 ? 0 : std::max(3u, 32u / static_cast<uint32_t>(n_local - 1));
  }
  // There is a ring for each pair of ranks, so they share kRingsBytes: 128 KiB each up to 32 ranks.
  // One must hold several of the largest inline frames. Decision 20 has what smaller ones cost.
  static size_t ring_bytes(int n_local) {
    constexpr size_t kRingsBytes = 4u << 20;
    const size_t share = std::bit_floor(kRingsBytes / static_cast<size_t>(n_local));
    return std::clamp<size_t>(share, 16u << 10, 128u << 10);
  }
  // Larger payloads travel in slots, which need no second copy for several receivers. Words for
  // people (kMaxText) fit.
  static size_t max_inline(int n_local) {
    return std::min<size_t>(ring_bytes(n_local) / 4, 16u << 10);
  }

  ArenaView() = default;
  ArenaView(std::byte* base, int n_local)
      : base_(base),
        n_local_(n_local),
        ring_bytes_(ring_bytes(n_local)),
        rings_offset_(whole_pages(sizeof(ArenaHeader) + n_slots() * sizeof(uint64_t))),
        slots_offset_(whole_pages(ring_offset(n_local))) {}

  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(base_); }
  RingHeader& ring(int local) const {
    return *reinterpret_cast<RingHeader*>(base_ + ring_offset(local));
  }
  std::byte* ring_data(int local) const { return base_ + ring_offset(local) + sizeof(RingHeader); }
  size_t ring_bytes() const { return ring_bytes_; }
  std::atomic<uint64_t>* stamps() const {
    return reinterpret_cast<std::atomic<uint64_t>*>(base_ + sizeof(ArenaHeader));
  }
  std::byte* slots() const { return base_ + slots_offset_; }
  uint32_t n_slots() const { return static_cast<uint32_t>(n_local_ - 1) * slot_quota(n_local_); }
  int n_local() const { return n_local_; }
  size_t n_bytes() const { return slots_offset_ + n_slots() * Slots::kSlotBytes; }

  // Ring the owner's doorbell for `n_frames` new frames; 0: there is room in a ring again.
  void ring_bell(const DoorbellSocket& by, uint32_t n_frames, Ring how) const;
  bool has_died() const { return (header().life.load() & DeathMark::kDied) != 0; }

 protected:
  size_t ring_offset(int local) const {
    return rings_offset_ + static_cast<size_t>(local) * (sizeof(RingHeader) + ring_bytes_);
  }

  std::byte* base_ = nullptr;
  int n_local_ = 1;
  size_t ring_bytes_ = 0;
  size_t rings_offset_ = 0;
  size_t slots_offset_ = 0;  // at a page: slots are reserved one by one
};

// This process's own arena, and the host's memory in which it lies.
//
// Threads: the doorbell, sleep() and wake_callers() any; the rest under the channel's lock.
class Arena : public ArenaView, public std::enable_shared_from_this<Arena> {
 public:
  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Create the memory of a host with `n_local` processes, and enter it as the first.
  static Error create(int n_local, Arena& out);
  // Enter such memory as process `local`. May be repeated until another process has looked at it.
  // The descriptor passes to `out`, also on an error.
  static Error enter(int memory_fd, int n_local, int local, Arena& out);

  int local() const { return local_; }
  int memory_fd() const { return memory_fd_; }
  void close_memory_fd();
  const DoorbellSocket& doorbell_socket() const { return doorbell_socket_; }
  // In a forked child: close the descriptors, and do nothing else.
  void forsake();

  // The arena of another process, once it has entered.
  Error mate(int local, ArenaView& out) const;

  // Allocate a slot's memory; required before its first use.
  Error reserve_slot(uint32_t slot) const {
    return reserve_shared_memory(memory_fd_, offset() + slots_offset_ + slot * Slots::kSlotBytes,
                                 Slots::kSlotBytes);
  }

  // Wake callers of this process that sleep on its doorbell.
  void wake_callers() const;
  // Sleep until the doorbell differs from `seen`, `timeout_ns` has passed or a signal comes.
  void sleep(uint32_t seen, int64_t timeout_ns) const;

  // Read the doorbell's socket. `is_progress_thread`: the caller is the thread that rings are meant
  // for; otherwise that thread is woken if too much is left to read.
  void take_notes(bool is_progress_thread);
  // A shared region of a host-mate; null until its descriptor has arrived and after the release,
  // empty if it could not be mapped.
  const Mapping* region(int local, uint32_t id) const;
  // True if some region of that mate was not kept, for want of memory or because it had too many.
  bool misses_regions(int local) const { return n_missed_[static_cast<size_t>(local)] > 0; }
  void forget_regions(int local) {
    regions_[static_cast<size_t>(local)].clear();
    n_missed_[static_cast<size_t>(local)] = 0;
  }

 private:
  Error reserve();
  void begin();
  void take(const Note& note, int fd);
  size_t offset() const { return static_cast<size_t>(local_) * n_bytes(); }

  Mapping mapping_;
  int local_ = 0;
  int memory_fd_ = -1;
  DoorbellSocket doorbell_socket_;
  std::vector<std::map<uint32_t, Mapping>> regions_;  // by local
  std::vector<uint32_t> n_missed_;                    // by local
  DeathMark mark_;  // set after the socket has its name, which mates use once they see the mark
};

}  // namespace shoal
