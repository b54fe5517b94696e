// Where host-mates wake this process's progress thread, and hand it descriptors of shared memory:
// one datagram socket for all of them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/error.h"
#include "transport/frame.h"

namespace shoal {

// What a host-mate must know to ring. It stands in memory that only members map; the name alone
// anyone can find.
struct DoorbellAddress {
  std::array<char, 6> name{};  // abstract (unix(7)), given by the kernel
  std::array<std::byte, 16> cookie{};
};

// What crosses the socket: a ring is the cookie alone.
struct Note {
  std::array<std::byte, 16> cookie;
  Header header;  // its `flow`: the sender's place among the ranks of the host
  Place place;
};

// A datagram without the cookie costs its sender time, and nobody else: the kernel drops it on that
// side, with whatever rides along.
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

  // Wakes whoever watches the other end. That no more fits in there means that it is rung already.
  void ring(const DoorbellAddress& there) const;

  // Sends a note, with a descriptor if `fd` is not -1. False if that cannot be done now.
  //
  // A descriptor reaches its owner or nobody: names become free when a process dies, and a stranger
  // may take them. `life` is the word of the one that is meant (death_mark.h).
  bool hand_over(const DoorbellAddress& there, Note note, int fd,
                 const std::atomic<uint32_t>& life) const;

  // Takes the next datagram. A note is written to `note`, with its descriptor, which is the
  // caller's from here on, or -1.
  enum class Took { kNothing, kRing, kNote };
  Took take(Note& note, int& fd) const;

 private:
  int fd_ = -1;
  DoorbellAddress address_;
};

}  // namespace shoal
