#include "transport/acceptor.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <new>
#include <tuple>
#include <utility>

#include "base/clock.h"

namespace shoal {
namespace {

constexpr int64_t kPauseNs = 50 * kMillisecond;  // without even a spare descriptor

int open_spare() { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

bool is_for_request(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

}  // namespace

Acceptor::Acceptor(int epoll_fd, uint64_t first_tag, const std::vector<int>& listeners,
                   ServerHandshake::Admit admit,
                   std::function<void(Authenticated)> on_authenticated, Options options)
    : epoll_fd_(epoll_fd),
      first_tag_(first_tag),
      admit_(std::move(admit)),
      on_authenticated_(std::move(on_authenticated)),
      options_(std::move(options)),
      spare_fd_(open_spare()) {
  for (const int fd : listeners) open(fd);
}

Acceptor::~Acceptor() { close(); }

void Acceptor::close() {
  for (Pending& pending : pending_) drop(pending);
  for (const Listener& listener : listeners_)
    if (listener.fd >= 0) ::close(listener.fd);
  listeners_.clear();
  if (spare_fd_ >= 0) ::close(std::exchange(spare_fd_, -1));
}

void Acceptor::open(int listener) {
  fcntl(listener, F_SETFL, fcntl(listener, F_GETFL) | O_NONBLOCK);
  listeners_.push_back({listener, Address::family_of(listener) == AF_UNIX});
  if (paused_until_ == 0 && !watch(listeners_.size() - 1, true)) pause(1);
}

std::vector<int> Acceptor::hand_over() {
  std::vector<int> handed;
  for (size_t at = 0; at < listeners_.size(); ++at) {
    if (listeners_[at].is_local || listeners_[at].fd < 0) continue;
    if (paused_until_ == 0) watch(at, false);
    handed.push_back(std::exchange(listeners_[at].fd, -1));
  }
  return handed;
}

size_t Acceptor::n_pending() const {
  return static_cast<size_t>(std::count_if(pending_.begin(), pending_.end(),
                                           [](const Pending& one) { return one.fd >= 0; }));
}

uint64_t Acceptor::tag_of(const Pending& pending) const {
  return first_tag_ + static_cast<uint64_t>(&pending - pending_.data());
}

void Acceptor::on_event(uint64_t tag, int64_t now) {
  const size_t at = tag - first_tag_;
  if (at < kMostPending) {
    if (pending_[at].fd >= 0) read(pending_[at]);
  } else if (at - kMostPending < listeners_.size() && paused_until_ == 0) {
    accept_some(at - kMostPending, now);
  }
}

int64_t Acceptor::expire(int64_t now) {
  if (paused_until_ != 0 && now >= paused_until_) {
    paused_until_ = 0;
    if (spare_fd_ < 0) spare_fd_ = open_spare();
    if (!listen(true)) pause(now + kPauseNs);
  }
  int64_t next = paused_until_ != 0 ? paused_until_ : kNever;
  for (Pending& pending : pending_) {
    if (pending.fd < 0) continue;
    if (now - pending.since_ns >= options_.pending_ns)
      drop(pending);
    else
      next = std::min(next, pending.since_ns + options_.pending_ns);
  }
  return next;
}

// False if the kernel has no memory to watch the listener.
bool Acceptor::listen(bool on) {
  bool is_done = true;
  for (size_t at = 0; at < listeners_.size(); ++at)
    if (listeners_[at].fd >= 0) is_done &= watch(at, on);
  return is_done;
}

bool Acceptor::watch(size_t at, bool on) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = first_tag_ + kMostPending + at;
  return epoll_ctl(epoll_fd_, on ? EPOLL_CTL_ADD : EPOLL_CTL_DEL, listeners_[at].fd, &event) == 0;
}

void Acceptor::pause(int64_t until) {
  if (paused_until_ == 0) listen(false);
  paused_until_ = std::max(until, int64_t{1});
}

void Acceptor::accept_some(size_t at, int64_t now) {
  if (now - burst_ns_ >= options_.burst_ns) {
    burst_ns_ = now;
    n_in_burst_ = 0;
  }
  while (paused_until_ == 0 && at < listeners_.size() && listeners_[at].fd >= 0) {
    const Listener listener = listeners_[at];  // NOT a reference: `admit_` may close us
    if (n_in_burst_++ >= options_.burst) return pause(burst_ns_ + options_.burst_ns);
    const int fd = accept4(listener.fd, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (fd >= 0 && listener.is_local && !is_of_our_user(fd))
      ::close(fd);
    else if (fd >= 0)
      receive(fd, now);
    else if (errno == EAGAIN || errno == EWOULDBLOCK ||
             (is_for_request(errno) && !turn_away(listener.fd, now)))
      return;
    // A failure of that caller alone: accept(2).
  }
}

// Uses the spare descriptor to close a new caller, which would otherwise wait forever. Returns
// false if no caller waits.
bool Acceptor::turn_away(int listener, int64_t now) {
  if (spare_fd_ < 0) {
    pause(now + kPauseNs);
    return false;
  }
  ::close(std::exchange(spare_fd_, -1));
  Address caller;
  caller.length = sizeof(caller.at);
  const int fd = accept4(listener, reinterpret_cast<sockaddr*>(&caller.at), &caller.length,
                         SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0 && is_for_request(errno)) pause(now + kPauseNs);
  if (fd >= 0) {
    ++n_turned_away_;
    ::close(fd);
    if (options_.on_turned_away) options_.on_turned_away(caller);
  }
  spare_fd_ = open_spare();
  return fd >= 0;
}

void Acceptor::receive(int fd, int64_t now) {
  Pending& place = place_for_one();
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = tag_of(place);
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
    ::close(fd);
    return;
  }
  place.fd = fd;
  place.since_ns = now;
  try {
    place.handshake = std::make_shared<ServerHandshake>(admit_);
  } catch (const std::bad_alloc&) {
    return drop(place);
  }
  read(place);  // a rank sends HELLO as soon as it is connected
}

// Returns a free place, or evicts the oldest caller that has sent no valid HELLO, or if all have,
// the oldest caller. A valid HELLO protects no caller for good, because a recorded one can be
// replayed.
Acceptor::Pending& Acceptor::place_for_one() {
  const auto rank_of = [](const Pending& one) {
    return std::tuple(one.fd >= 0, one.fd >= 0 && one.handshake->hello().has_value(), one.since_ns);
  };
  Pending& place = *std::ranges::min_element(pending_, {}, rank_of);
  drop(place);
  return place;
}

void Acceptor::read(Pending& pending) {
  std::array<std::byte, 128> room;
  const std::shared_ptr<ServerHandshake> handshake = pending.handshake;
  try {
    if (is_strange(pending)) {
      epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, pending.fd, nullptr);
      options_.on_stranger(pending.fd);
      pending.fd = -1;
      pending.handshake.reset();
      return;
    }
    while (const size_t wants = std::min(handshake->wants(), room.size())) {
      const ssize_t n = recv(pending.fd, room.data(), wants, 0);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
      if (n <= 0) return drop(pending);
      std::vector<std::byte> reply;
      handshake->feed({room.data(), static_cast<size_t>(n)}, reply);
      if (pending.handshake != handshake) return;  // the callback for its HELLO has closed it
      // A few bytes go into an empty buffer. A caller without room for them is no rank of ours.
      const auto n_reply = static_cast<ssize_t>(reply.size());
      if (n_reply > 0 && send(pending.fd, reply.data(), reply.size(), MSG_NOSIGNAL) != n_reply)
        return drop(pending);
    }
    settle(pending);
  } catch (const std::exception&) {  // no memory for this caller
    drop(pending);
  }
}

// True if the connection begins like another protocol. Takes nothing from the socket.
bool Acceptor::is_strange(const Pending& pending) const {
  if (options_.beginnings.empty() || pending.handshake->hello()) return false;
  Beginning first{};
  const ssize_t n = recv(pending.fd, first.data(), first.size(), MSG_PEEK);
  return n == static_cast<ssize_t>(first.size()) &&
         std::ranges::find(options_.beginnings, first) != options_.beginnings.end();
}

void Acceptor::settle(Pending& pending) {
  const Progress progress = pending.handshake->progress();
  if (progress != Progress::kDone) {
    const std::optional<Hello> hello = pending.handshake->hello();
    drop(pending);
    if (progress == Progress::kKeyDiffers && options_.on_key_differs)
      options_.on_key_differs(*hello);
    return;
  }
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, pending.fd, nullptr);
  on_authenticated_({*pending.handshake->hello(), pending.fd, pending.handshake->session()});
  pending.fd = -1;
  pending.handshake.reset();
}

void Acceptor::drop(Pending& pending) {
  if (pending.fd < 0) return;
  ::close(std::exchange(pending.fd, -1));
  pending.handshake.reset();
}

}  // namespace shoal
