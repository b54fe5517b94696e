// Dials peers until each is reached or forgotten, with growing pauses. Never blocks.
#pragma once

#include <functional>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "transport/acceptor.h"
#include "transport/address.h"
#include "transport/handshake.h"

namespace shoal {

// Threads: one at a time.
class Connector {
 public:
  static constexpr int64_t kNever = Acceptor::kNever;
  static constexpr size_t kMostDials = 64;  // at a time

  struct Wish {
    Hello hello;
    Address to, from;      // `from`: the local address, while this host has it; none: any
    bool is_kept = false;  // keeps dialling after the peer has proved itself
    int64_t pause_ns = 0;  // before the first dial
    uint64_t number = 0;   // distinguishes wishes with the same HELLO
  };
  // Why one dial failed: an errno, or how the handshake ended.
  struct Failure {
    uint64_t number = 0;  // of the wish
    int error = 0;
    Progress progress = Progress::kWaiting;
    bool was_connected = false;
  };
  // `proven` is called when the peer has proved the key, `gone` when the host answers but the
  // process is gone, and `failed`, if set, for each dial that did not reach its peer.
  struct Outcome {
    std::function<void(Authenticated)> proven;
    std::function<void(const Hello&, const std::string& why)> gone;
    std::function<void(const Failure&)> failed;
  };
  struct Pace {
    // The time for one dial. A kernel that answers does so in a round trip. After a lost SYN a new
    // dial is quicker than the kernel, whose pauses double.
    int64_t dial_ns = kSecond;
    int64_t first_pause_ns = 10 * kMillisecond;  // the next ones double
    int64_t longest_pause_ns = kSecond;
  };

  // Watches by `epoll_fd` under tags from `first_tag` on; hand events with these to on_event().
  // `key`: the one to prove to this peer.
  Connector(int epoll_fd, uint64_t first_tag, std::function<Secret(const Wish&)> key,
            Outcome outcome, const Pace& pace);
  ~Connector();
  Connector(const Connector&) = delete;

  // Begins to dial, unless there is such a wish already.
  void want(Wish wish, int64_t now);
  void hasten(uint32_t peer, uint32_t path, int64_t now);  // dials at once: the network works again
  void forget(uint32_t peer, uint32_t path);
  void forget(uint64_t number);
  // The errno with which the last dial of a path to this peer failed; 0: none has failed.
  int last_error(uint32_t peer) const;

  void on_event(uint64_t tag, int64_t now);
  // Begins the dials that are due, and gives up dials that take too long. Returns when to call it
  // again.
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

  void forget_if(const std::function<bool(const Wish&)>& is_meant);
  void begin(Dial& dial, int64_t now);
  int posted_towards(const Wish& wish);
  bool go_on(Dial& dial, int64_t now);
  bool greet(Dial& dial);
  void fail(Dial& dial, int error, int64_t now);
  void retry(Dial& dial, int64_t now);
  void hang_up(Dial& dial);

  const int epoll_fd_;
  const uint64_t first_tag_;
  const std::function<Secret(const Wish&)> key_;
  const Outcome outcome_;
  const Pace pace_;
  std::list<Dial> dials_;
  uint64_t n_ever_ = 0;
};

}  // namespace shoal
