// Dials peers: in turn, without blocking, with growing pauses, until it is told not to.
#pragma once

#include <sys/socket.h>

#include <functional>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "transport/acceptor.h"
#include "transport/handshake.h"

namespace shoal {

// A socket address, as the kernel takes it.
struct Address {
  sockaddr_storage at{};
  socklen_t length = 0;  // 0: none

  // Of numbers, as "10.0.0.2" or "fd00::2"; none if it is no such.
  static Address of(const std::string& host, uint16_t port);
  // Of this end of a connection, with port 0; none if that cannot be told.
  static Address local_of(int fd);
  std::string text() const;
};

// Threads: one at a time.
class Connector {
 public:
  static constexpr int64_t kNever = Acceptor::kNever;
  static constexpr size_t kMostDials = 64;  // at a time

  struct Wish {
    Hello hello;
    Address to, from;      // `from`: where to dial from while this host has it; none: anywhere
    bool is_kept = false;  // also once it was proved: it is asked again and again
    int64_t pause_ns = 0;  // before the first dial
  };
  // What came of a dial: proved; or the host answers, and the process is gone.
  struct Outcome {
    std::function<void(Authenticated)> proven;
    std::function<void(const Hello&, const std::string& why)> gone;
  };

  // Watches by `epoll_fd` under tags from `first_tag` on; hand events with these to on_event().
  // `key`: the one to prove to this peer.
  Connector(int epoll_fd, uint64_t first_tag, std::function<Secret(const Hello&)> key,
            Outcome outcome);
  ~Connector();
  Connector(const Connector&) = delete;

  // Nothing, if there is such a wish.
  void want(Wish wish, int64_t now);
  void hasten(uint32_t peer, uint32_t path, int64_t now);  // its network works again
  void forget(uint32_t peer, uint32_t path);
  // Why the last dial of a path of this peer failed, as errno says it; 0: none has.
  int last_error(uint32_t peer) const;

  void on_event(uint64_t tag, int64_t now);
  // Begins the dials that are due, and gives up those that take too long. When to call it again.
  int64_t step(int64_t now);
  void close();  // idempotent

 private:
  struct Dial {
    Wish wish;
    uint64_t tag = 0;
    int fd = -1;  // -1: between two dials
    bool is_connected = false;
    std::optional<ClientHandshake> handshake;
    int64_t due_ns = 0;    // when to dial, or when to give it up
    int64_t pause_ns = 0;  // the next one
    int error = 0;         // of the last one, once one has failed
  };

  void begin(Dial& dial, int64_t now);
  int posted_towards(const Wish& wish);
  bool go_on(Dial& dial, int64_t now);
  bool greet(Dial& dial);
  void fail(Dial& dial, int error, int64_t now);
  void retry(Dial& dial, int64_t now);
  void hang_up(Dial& dial);

  const int epoll_fd_;
  const uint64_t first_tag_;
  const std::function<Secret(const Hello&)> key_;
  const Outcome outcome_;
  std::list<Dial> dials_;
  uint64_t n_ever_ = 0;
};

}  // namespace shoal
