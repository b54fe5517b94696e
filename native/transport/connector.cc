#include "transport/connector.h"

#include <netinet/in.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <utility>

#include "base/clock.h"

namespace shoal {
namespace {

void set(int fd, int level, int option) {
  const int on = 1;
  setsockopt(fd, level, option, &on, sizeof(on));
}

}  // namespace

Connector::Connector(int epoll_fd, uint64_t first_tag, std::function<Secret(const Wish&)> key,
                     Outcome outcome, const Pace& pace)
    : epoll_fd_(epoll_fd),
      first_tag_(first_tag),
      key_(std::move(key)),
      outcome_(std::move(outcome)),
      pace_(pace) {}

Connector::~Connector() { close(); }

void Connector::close() {
  for (Dial& dial : dials_) hang_up(dial);
  dials_.clear();
}

void Connector::want(Wish wish, int64_t now) {
  const auto same = [&](const Dial& dial) {
    return dial.wish.hello == wish.hello && dial.wish.number == wish.number;
  };
  if (wish.to.length == 0 || std::any_of(dials_.begin(), dials_.end(), same)) return;
  Dial& dial = dials_.emplace_back();
  dial.due_ns = now + wish.pause_ns;
  dial.pause_ns = std::max(pace_.first_pause_ns, wish.pause_ns);
  dial.tag = first_tag_ + n_ever_++;
  dial.wish = std::move(wish);
}

void Connector::hasten(uint32_t peer, uint32_t path, int64_t now) {
  for (Dial& dial : dials_) {
    if (dial.wish.hello.to_rank != peer || dial.wish.hello.path != path || dial.fd >= 0) continue;
    dial.due_ns = now;
    dial.pause_ns = pace_.first_pause_ns;
  }
}

void Connector::forget(uint32_t peer, uint32_t path) {
  forget_if(
      [&](const Wish& wish) { return wish.hello.to_rank == peer && wish.hello.path == path; });
}

void Connector::forget(uint64_t number) {
  forget_if([&](const Wish& wish) { return wish.number == number; });
}

void Connector::forget_if(const std::function<bool(const Wish&)>& is_meant) {
  std::erase_if(dials_, [&](Dial& dial) {
    if (!is_meant(dial.wish)) return false;
    hang_up(dial);
    return true;
  });
}

int Connector::last_error(uint32_t peer) const {
  for (const Dial& dial : dials_)
    if (dial.wish.hello.to_rank == peer && dial.error != 0) return dial.error;
  return 0;
}

int64_t Connector::step(int64_t now) {
  auto n_open = static_cast<size_t>(
      std::count_if(dials_.begin(), dials_.end(), [](const Dial& dial) { return dial.fd >= 0; }));
  int64_t next = kNever;
  for (Dial& dial : dials_) {
    if (now >= dial.due_ns) {
      const bool was_posted = dial.fd >= 0;
      if (was_posted) fail(dial, ETIMEDOUT, now);
      if (!was_posted && n_open >= kMostDials) dial.due_ns = now + pace_.first_pause_ns;
      if (!was_posted && n_open < kMostDials) begin(dial, now);
      n_open += !was_posted && dial.fd >= 0;
    }
    next = std::min(next, dial.due_ns);
  }
  return next;
}

int Connector::posted_towards(const Wish& wish) {
  const int fd = socket(wish.to.at.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return -1;
  const auto* from = reinterpret_cast<const sockaddr*>(&wish.from.at);
  const auto* to = reinterpret_cast<const sockaddr*>(&wish.to.at);
  set(fd, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT);
  if ((wish.from.length == 0 || bind(fd, from, wish.from.length) == 0) &&
      (connect(fd, to, wish.to.length) == 0 || errno == EINPROGRESS))
    return fd;
  const int error = errno;
  ::close(fd);
  errno = error;
  return -1;
}

void Connector::begin(Dial& dial, int64_t now) {
  dial.fd = posted_towards(dial.wish);
  if (dial.fd < 0 && errno == EADDRNOTAVAIL) dial.wish.from = {};  // gone: next from anywhere
  if (dial.fd < 0) return fail(dial, errno, now);
  epoll_event event{};
  event.events = EPOLLOUT;
  event.data.u64 = dial.tag;
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, dial.fd, &event) != 0) return fail(dial, errno, now);
  dial.due_ns = now + pace_.dial_ns;
}

void Connector::on_event(uint64_t tag, int64_t now) {
  const auto found = std::find_if(dials_.begin(), dials_.end(), [&](const Dial& dial) {
    return dial.tag == tag && dial.fd >= 0;
  });
  if (found == dials_.end()) return;
  try {
    if (go_on(*found, now)) dials_.erase(found);
  } catch (const std::exception&) {  // no memory for this dial now
    fail(*found, ENOMEM, now);
  }
}

// Sends HELLO on a connection that was just made.
bool Connector::greet(Dial& dial) {
  int error = 0;
  socklen_t length = sizeof(error);
  if (getsockopt(dial.fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0 || error != 0) {
    errno = error;
    return false;
  }
  if (dial.wish.to.is_local() && !is_of_our_user(dial.fd)) {
    errno = EPERM;
    return false;
  }
  dial.is_connected = true;
  dial.handshake.emplace(dial.wish.hello, key_(dial.wish));
  const auto hello = dial.handshake->hello();
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = dial.tag;
  epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, dial.fd, &event);
  return send(dial.fd, hello.data(), hello.size(), MSG_NOSIGNAL) ==
         static_cast<ssize_t>(hello.size());
}

// Returns true if the wish is fulfilled.
bool Connector::go_on(Dial& dial, int64_t now) {
  if (!dial.is_connected && !greet(dial)) {
    fail(dial, errno, now);
    return false;
  }
  std::array<std::byte, 128> room;
  while (const size_t wants = std::min(dial.handshake->wants(), room.size())) {
    const ssize_t n = recv(dial.fd, room.data(), wants, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return false;
    std::vector<std::byte> reply;
    if (n > 0) dial.handshake->feed({room.data(), static_cast<size_t>(n)}, reply);
    const auto n_reply = static_cast<ssize_t>(reply.size());
    if (n <= 0 ||
        (n_reply > 0 && send(dial.fd, reply.data(), reply.size(), MSG_NOSIGNAL) != n_reply)) {
      fail(dial, n == 0 ? ECONNRESET : errno, now);
      return false;
    }
  }
  const Progress progress = dial.handshake->progress();
  if (progress == Progress::kStale)
    outcome_.gone(dial.wish.hello, "the process at " + dial.wish.to.text() +
                                       " has been replaced, or has given this rank up");
  if (progress == Progress::kDone && !dial.wish.is_kept) {
    epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, dial.fd, nullptr);
    outcome_.proven({dial.wish.hello, dial.fd, dial.handshake->session(), dial.wish.number});
    dial.fd = -1;
    return true;
  }
  retry(dial, now);
  if (outcome_.failed && progress != Progress::kDone)
    outcome_.failed({dial.wish.number, 0, progress, true});
  return false;
}

void Connector::fail(Dial& dial, int error, int64_t now) {
  const bool was_connected = dial.is_connected;
  dial.error = error;
  retry(dial, now);  // first, because reporting takes memory and may throw
  if (outcome_.failed)
    outcome_.failed({dial.wish.number, error, Progress::kWaiting, was_connected});
  if (error == ECONNREFUSED)
    outcome_.gone(dial.wish.hello, "no process listens at " + dial.wish.to.text() + " any more");
}

void Connector::retry(Dial& dial, int64_t now) {
  hang_up(dial);
  dial.due_ns = now + dial.pause_ns;
  dial.pause_ns = std::min(2 * dial.pause_ns, pace_.longest_pause_ns);
}

void Connector::hang_up(Dial& dial) {
  if (dial.fd >= 0) ::close(std::exchange(dial.fd, -1));
  dial.is_connected = false;
  dial.handshake.reset();
}

}  // namespace shoal
