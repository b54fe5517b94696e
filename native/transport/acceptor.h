// Accepts callers that prove the key, for the life of a job, and bounds the cost of all others.
//
// A stranger costs one descriptor for at most two seconds and 108 bytes read. Nothing here blocks.
// A caller that does not prove the key is closed without a reply. When the process has no
// descriptor left, new callers are closed or wait in the kernel. On a Unix socket a process of
// another user is closed unread.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "transport/address.h"
#include "transport/handshake.h"

namespace shoal {

// A connection whose other end has proved the key. Its holder closes `fd`.
struct Authenticated {
  Hello hello;
  int fd = -1;
  Secret session;
  uint64_t number = 0;  // of the Connector's wish
};

// Threads: one at a time.
class Acceptor {
 public:
  // A smaller number would turn away ranks of a large group, which all connect at once.
  static constexpr size_t kMostPending = 64;
  static constexpr int64_t kNever = INT64_MAX;

  using Beginning = std::array<char, 4>;
  struct Options {
    // The handshake takes two round trips, under a millisecond on a quiet network; this leaves room
    // for lost packets and a busy process.
    int64_t pending_ns = 2 * kSecond;
    // Accepts at most `burst` callers in `burst_ns`, so a flood of strangers costs a few hundredths
    // of a core. The others wait in the kernel, ranks among them: behind a thousand strangers for
    // less than a second.
    int burst = 32;
    int64_t burst_ns = 20 * kMillisecond;
    // The first bytes of other protocols. `on_stranger` gets such a connection with nothing read.
    std::vector<Beginning> beginnings = {};
    std::function<void(int fd)> on_stranger = nullptr;
    std::function<void(const Hello&)> on_key_differs = nullptr;
    std::function<void(const Address&)> on_turned_away = nullptr;  // see n_turned_away()
  };

  // Owns `listeners`, and makes them non-blocking. Watches by `epoll_fd`, under tags from
  // `first_tag` on; hand events with these to on_event().
  Acceptor(int epoll_fd, uint64_t first_tag, const std::vector<int>& listeners,
           ServerHandshake::Admit admit, std::function<void(Authenticated)> on_authenticated,
           Options options);
  ~Acceptor();
  Acceptor(const Acceptor&) = delete;

  void on_event(uint64_t tag, int64_t now);
  // Closes callers that were silent too long, and listens again after a pause. Returns when to call
  // it again.
  int64_t expire(int64_t now);
  void open(int listener);        // one more, under the same rules
  void shut() { pause(kNever); }  // accepts no more: callers wait in the kernel
  std::vector<int> hand_over();   // the listeners for other hosts; the caller owns them
  void close();                   // idempotent
  size_t n_pending() const;
  // The number of callers that were closed because this process had no descriptor left.
  uint64_t n_turned_away() const { return n_turned_away_; }

 private:
  struct Pending {
    int fd = -1;  // -1: a free place
    int64_t since_ns = 0;
    std::shared_ptr<ServerHandshake> handshake;
  };

  struct Listener {
    int fd = -1;  // -1: it was handed over
    bool is_local = false;
  };

  void accept_some(size_t at, int64_t now);
  void receive(int fd, int64_t now);
  Pending& place_for_one();
  void read(Pending& pending);
  bool is_strange(const Pending& pending) const;
  void settle(Pending& pending);
  void drop(Pending& pending);
  bool turn_away(int listener, int64_t now);
  void pause(int64_t until);
  bool listen(bool on);
  bool watch(size_t at, bool on);
  uint64_t tag_of(const Pending& pending) const;

  const int epoll_fd_;
  const uint64_t first_tag_;
  std::vector<Listener> listeners_;
  const ServerHandshake::Admit admit_;
  const std::function<void(Authenticated)> on_authenticated_;
  const Options options_;
  std::array<Pending, kMostPending> pending_;
  int spare_fd_ = -1;
  uint64_t n_turned_away_ = 0;
  int64_t paused_until_ = 0;  // 0: listening
  int64_t burst_ns_ = 0;      // when the last burst began
  int n_in_burst_ = 0;
};

}  // namespace shoal
