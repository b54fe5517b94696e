// One datagram socket by which host-mates wake this process's progress thread and pass it
// descriptors of shared memory.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/error.h"
#include "transport/frame.h"

namespace shoal {

// The address and the cookie needed to ring. They lie in memory that only members map; the name
// alone can be found by anyone.
struct DoorbellAddress {
  std::array<char, 6> name{};  // abstract (unix(7)), given by the kernel
  std::array<std::byte, 16> cookie{};
};

// The contents of a datagram; a ring is the cookie alone.
struct Note {
  std::array<std::byte, 16> cookie;
  Header header;  // its `flow`: the sender's place among the ranks of the host
  Place place;
};

// A datagram without the cookie costs only its sender time: the kernel drops it there, with any
// descriptor in it.
//
// Threads: ring() and hand_over() any; the rest one at a time.
class DoorbellSocket {
 public:
  DoorbellSocket() = default;
  ~DoorbellSocket() { close(); }
  DoorbellSocket(const DoorbellSocket&) = delete;
  DoorbellSocket& operator=(const DoorbellSocket&) = delete;

  Error open();
  void close();
  int fd() const { return fd_; }
  const DoorbellAddress& address() const { return address_; }

  // Wake the thread that watches the other end. If the socket is full, it has been rung already.
  void ring(const DoorbellAddress& there) const;

  // Send a note, with a descriptor if `fd` is not -1. False if that is not possible now.
  //
  // The descriptor reaches the intended process or none: a name becomes free when its process dies,
  // and a stranger may take it. `life` is the intended process's word (death_mark.h).
  bool hand_over(const DoorbellAddress& there, Note note, int fd,
                 const std::atomic<uint32_t>& life) const;

  // Take the next datagram. A note is written to `note`, with its descriptor, now owned by the
  // caller, or -1.
  enum class Took { kNothing, kRing, kNote };
  Took take(Note& note, int& fd) const;

 private:
  int fd_ = -1;
  DoorbellAddress address_;
};

}  // namespace shoal
