// An authenticated connection of the control plane: small messages, in order, each sealed.
//
// A frame is {magic, version, kind, length}, the body, and a MAC of its number in this direction
// and all of that, under a key of this connection and direction. So no frame can be changed, left
// out, repeated, reflected or moved to another connection. A length is checked against its kind's
// limit before memory is allocated, and memory grows only with the bytes that have arrived.
#pragma once

#include <sys/socket.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/mac.h"

namespace shoal {

struct Frame {
  uint16_t kind = 0;
  std::vector<std::byte> body;
  int fd = -1;  // passed with it; the receiver of the frame closes it
};

// Threads: one at a time.
class Peer {
 public:
  static constexpr size_t kHeadBytes = 16;
  static constexpr size_t kFrameBytes = kHeadBytes + sizeof(Digest);  // besides the body
  static constexpr int64_t kPatient = INT64_MAX / 2;                  // for ever

  // Owns `fd`, which is non-blocking, and watches it by `epoll_fd` under `tag`. `session`: the
  // secret that the handshake gave both ends. `is_caller`: this end connected. The connection ends
  // if more than `most_queued` bytes wait to be sent, or if a message stalls half way for
  // `patience_ns`, in either direction.
  Peer(int epoll_fd, uint64_t tag, int fd, const Secret& session, bool is_caller,
       size_t most_queued, int64_t patience_ns = kPatient);
  ~Peer();
  Peer(const Peer&) = delete;

  // From now on it accepts frames of this kind; all others end the connection.
  void expect(uint16_t kind, size_t most_bytes, bool takes_fd = false);
  // Queues a frame and sends what the socket takes. `passed`: a descriptor to pass along, borrowed
  // for the call; -1: none. False: the connection is lost, or was closed.
  bool send(uint16_t kind, Bytes body, int passed = -1);
  void pause(bool is_paused);  // stops reading for now; arriving bytes stay in the kernel
  void close();                // at once, and drops queued frames; idempotent

  int fd() const { return fd_; }  // -1: closed
  bool is_open() const { return fd_ >= 0 && !is_lost(); }
  bool is_local() const { return is_local_; }
  size_t n_queued() const { return n_queued_; }  // bytes that wait to be sent

  // ---- for the endpoint

  // Reads and sends until the socket blocks, at most one frame: the next is read when that one was
  // handled. `has_ended`: epoll reports the end of the connection. Check is_lost() next.
  std::optional<Frame> step(int64_t now, bool has_ended);
  bool is_lost() const { return !why_.empty(); }
  int error() const { return error_; }
  const std::string& why() const { return why_; }
  // When step() has work without an event; INT64_MAX: never. A socket that could not be watched is
  // lost, and has no events.
  int64_t deadline() const { return is_lost() ? 0 : std::min(held_until_, stuck_until_); }

 private:
  struct Bound {
    size_t most_bytes = 0;
    bool takes_fd = false;
  };
  struct Queued {
    std::vector<std::byte> bytes;  // of the whole frame, after the number that its MAC covers
    size_t at = 0;
    int passed = -1;  // borrowed; owned if the frame has to wait
    bool is_owned = false;
  };

  void flush();
  bool keep_passed();
  std::optional<Frame> read();
  bool receive(size_t n_bytes);
  bool take_passed(const msghdr& message);
  bool take_head();
  std::optional<Frame> take_frame();
  void lose(int error, std::string why);
  void lose_stuck(int64_t now, bool has_moved);
  void watch();
  void drop_all();

  const int epoll_fd_;
  const uint64_t tag_;
  int fd_;
  const bool is_local_;
  const size_t most_queued_;
  const int64_t patience_ns_;
  const Secret send_key_, receive_key_;
  std::map<uint16_t, Bound> expected_;
  std::deque<Queued> outbox_;
  size_t n_queued_ = 0;
  int64_t held_until_ = INT64_MAX;   // a passed descriptor has to wait, without an event at its end
  int64_t stuck_until_ = INT64_MAX;  // unless a byte of a message moves before
  uint64_t n_sent_ = 0, n_read_ = 0;
  std::vector<std::byte> inbox_;  // the number of the frame, and its bytes so far
  size_t n_frame_ = 0;            // size of the frame in the inbox; 0: not known yet
  int passed_ = -1;               // that arrived with it
  uint32_t events_ = UINT32_MAX;  // that epoll watches
  bool is_paused_ = false;
  int error_ = 0;
  std::string why_;  // a verb phrase; empty: the connection is up
};

}  // namespace shoal
