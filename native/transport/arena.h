// What a process shares with its host-mates: a bell, a ring of frames from each of them, and slots.
//
//   [ArenaHeader | stamps | ring from local 0 | ring from local 1 | ... | slot 0 | slot 1 | ...]
//
// The owner reads its rings and fills its slots; peer i writes ring i and reads slots and their
// stamps (slots.h). All memory but that of the slots is reserved when the arena is made, that of a
// slot when it is first used.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "base/shared_memory.h"
#include "transport/frame.h"
#include "transport/slots.h"

namespace shoal {

// Who looks after an arena, in ArenaHeader::watch.
inline constexpr uint32_t kCallerSleeps = 1;  // on the futex
inline constexpr uint32_t kLaneSleeps = 2;    // in epoll, woken by the eventfd
inline constexpr uint32_t kDriven = 4;        // some caller is in wait(), asleep or not

// Whom a bell wakes.
enum class Ring : uint8_t {
  kCounted,  // whoever sleeps; a caller only once all that it waits for has come
  kNow,      // whoever sleeps
  kAlways,   // the lane if nobody drives or sleeps: it must be looked at even between calls
};

struct ArenaHeader {
  static constexpr uint64_t kMagic = 0x31616e6572616873;  // "sharena1"

  uint64_t magic = 0;
  uint32_t n_local = 0;
  uint32_t n_slots = 0;
  alignas(64) std::atomic<uint32_t> bell{0};  // counts the frames that came; the futex word
  std::atomic<uint32_t> watch{0};
  std::atomic<uint32_t> wake_at{0};  // a caller need not wake before this count
  std::atomic<uint32_t> alarm{0};    // something came that cannot wait for the next call
  alignas(64) std::atomic<int64_t> heartbeat_ns{0};
};

struct RingHeader {
  alignas(64) std::atomic<uint64_t> head{0};  // bytes ever written, by the producer
  alignas(64) std::atomic<uint64_t> tail{0};  // bytes ever read, by the consumer
  // The producer found the ring full: whoever reads from it rings the producer's bell.
  std::atomic<uint32_t> is_full{0};
};

class Arena {
 public:
  // A ring must hold several of the largest inline frames; it costs memory per pair of ranks.
  static constexpr size_t kRingBytes = 128u << 10;
  // Larger payloads travel in slots, which need no second copy for several receivers.
  static constexpr size_t kMaxInline = 16u << 10;
  // Slots each host-mate may hold at a time: the depth of the pipeline through private memory.
  // Every exhausted pipeline is a context switch where ranks outnumber cores; every slot is memory
  // of each of the n_local processes that map it.
  static uint32_t slot_quota(int n_local) {
    return n_local < 2 ? 0 : std::max(3u, 32u / static_cast<uint32_t>(n_local - 1));
  }

  Arena() = default;
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // A fresh arena for `n_local` processes of this host, this one included.
  static Error create(int n_local, Arena& out);
  // Maps a host-mate's arena. The descriptors stay the caller's.
  static Error open(int memory_fd, int n_local, Arena& out);

  int memory_fd() const { return memory_fd_; }
  int event_fd() const { return event_fd_; }
  void close_memory_fd();
  // Gives a slot its memory, which has to come before its first use.
  Error reserve_slot(uint32_t slot) const {
    return reserve_shared_memory(memory_fd_, slots_offset() + slot * Slots::kSlotBytes,
                                 Slots::kSlotBytes);
  }

  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(mapping_.data()); }
  RingHeader& ring(int local) const {
    return *reinterpret_cast<RingHeader*>(mapping_.data() + ring_offset(local));
  }
  std::byte* ring_data(int local) const {
    return mapping_.data() + ring_offset(local) + sizeof(RingHeader);
  }
  std::atomic<uint64_t>* stamps() const {
    return reinterpret_cast<std::atomic<uint64_t>*>(mapping_.data() + sizeof(ArenaHeader));
  }
  std::byte* slots() const { return mapping_.data() + slots_offset(); }
  uint32_t n_slots() const { return n_slots_; }
  bool mapped() const { return mapping_.data() != nullptr; }

  // Tells the owner of this arena that so many frames came, or with 0 that it may send again.
  void ring_bell(int owner_event_fd, uint32_t n_frames, Ring how) const;
  // Wakes callers of this very process that sleep on their own bell.
  void wake_callers() const;
  // Sleeps until the bell is not `seen` any more, `timeout_ns` passed or a signal came.
  void sleep(uint32_t seen, int64_t timeout_ns) const;

 private:
  static constexpr size_t kPage = 4096;
  static size_t whole_pages(size_t n_bytes) { return (n_bytes + kPage - 1) / kPage * kPage; }
  size_t ring_offset(int local) const {
    return whole_pages(sizeof(ArenaHeader) + n_slots_ * sizeof(uint64_t)) +
           static_cast<size_t>(local) * (sizeof(RingHeader) + kRingBytes);
  }
  size_t slots_offset() const { return whole_pages(ring_offset(n_local_)); }
  size_t size() const { return slots_offset() + n_slots_ * Slots::kSlotBytes; }

  Mapping mapping_;
  int n_local_ = 0;
  uint32_t n_slots_ = 0;
  int memory_fd_ = -1, event_fd_ = -1;
};

}  // namespace shoal
