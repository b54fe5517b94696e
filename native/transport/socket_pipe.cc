#include "transport/socket_pipe.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <utility>

#include "base/clock.h"

namespace shoal {
namespace {

// Unsent bytes in the kernel cannot be overtaken, but if they run out while this process has no
// core, the wire idles. So keep a quarter of a millisecond's worth, at the recent rate.
constexpr uint64_t kUnsentPerSecond = 4000;
constexpr uint64_t kLeastUnsent = 32u << 10;
constexpr uint64_t kMostUnsent = 4u << 20;
constexpr uint64_t kLookEvery = 4u << 20;  // bytes
// TCP keepalive of an idle connection, in seconds: its peer may have lost it long ago, and wait to
// be dialled.
constexpr int kAskAfterS = 1;
constexpr int kUnanswered = 3;
// The longest round trip, in microseconds, of hosts that are near each other.
constexpr uint32_t kNearUs = 2000;
// By how much silence() may date back the oldest unconfirmed byte. A shorter time would ask the
// kernel at more writes.
constexpr int64_t kOwedErrorNs = 10 * kMillisecond;

}  // namespace

// The options have no effect on Unix sockets.
SocketPipe::SocketPipe(int fd) : fd_(fd) {
  {
    std::lock_guard lock(forking());
    next_ = std::exchange(first(), this);
    if (next_ != nullptr) next_->before_ = this;
  }
  fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) | O_NONBLOCK);
  set(TCP_NODELAY, 1);
  set(TCP_KEEPIDLE, kAskAfterS);
  set(TCP_KEEPINTVL, kAskAfterS);
  set(TCP_KEEPCNT, kUnanswered);
  const int on = 1;
  setsockopt(fd_, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  suit_the_way();
}

SocketPipe::~SocketPipe() {
  std::lock_guard lock(forking());
  (before_ == nullptr ? first() : before_->next_) = next_;
  if (next_ != nullptr) next_->before_ = before_;
  ::close(fd_);
}

std::mutex& SocketPipe::forking() {
  static std::mutex* const mutex = new std::mutex;  // links may outlive static destructors
  return *mutex;
}

SocketPipe*& SocketPipe::first() {
  static SocketPipe* pipe = nullptr;
  return pipe;
}

void SocketPipe::forsake_all() {
  for (SocketPipe* pipe = first(); pipe != nullptr; pipe = pipe->next_)
    ::close(std::exchange(pipe->fd_, -1));
}

void SocketPipe::set(int option, int value) {
  setsockopt(fd_, IPPROTO_TCP, option, &value, sizeof(value));
}

void SocketPipe::suit_the_way() {
  n_until_look_ = kLookEvery;
  tcp_info info{};
  socklen_t n_bytes = sizeof(info);
  if (getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &n_bytes) != 0) return;
  const uint64_t worth = info.tcpi_delivery_rate / kUnsentPerSecond;
  const auto unsent = static_cast<int>(std::clamp(worth, kLeastUnsent, kMostUnsent));
  if (unsent != unsent_) set(TCP_NOTSENT_LOWAT, unsent);
  unsent_ = unsent;
  if (info.tcpi_min_rtt <= kNearUs) leave_bbr();
}

// BBR models the rate of one connection. A rank has many over one link, each busy for moments.
// Those that pause leave room, the others take that for the link's rate, and packets queue or are
// lost. Over long distances BBR stays, since packets are lost for other reasons there.
void SocketPipe::leave_bbr() {
  char name[16] = {};  // TCP_CA_NAME_MAX
  socklen_t n_bytes = sizeof(name);
  if (getsockopt(fd_, IPPROTO_TCP, TCP_CONGESTION, name, &n_bytes) != 0) return;
  if (std::strncmp(name, "bbr", 3) != 0) return;
  // Any process may choose reno; cubic needs root, unless it is the machine's default.
  for (const std::string_view other : {"cubic", "reno"})
    if (setsockopt(fd_, IPPROTO_TCP, TCP_CONGESTION, other.data(), other.size()) == 0) return;
}

ssize_t SocketPipe::write(const iovec* vectors, size_t n_vectors) {
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(vectors);
  message.msg_iovlen = n_vectors;
  const ssize_t n = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n <= 0) return n;
  note_written(n);
  n_until_look_ -= std::min(n_until_look_, static_cast<uint64_t>(n));
  if (n_until_look_ == 0) suit_the_way();
  return n;
}

// The bytes of earlier writes may have been confirmed since silence() was called last, perhaps long
// ago. Then these are the oldest unconfirmed ones.
void SocketPipe::note_written(ssize_t n_bytes) {
  const int64_t now = now_ns();
  const bool is_old = now - first_unconfirmed_ns_ >= kOwedErrorNs;
  if (is_old && (first_unconfirmed_ns_ == 0 || n_unconfirmed() <= n_bytes))
    first_unconfirmed_ns_ = now;
}

ssize_t SocketPipe::read(const iovec* vectors, size_t n_vectors) {
  return readv(fd_, vectors, static_cast<int>(n_vectors));
}

// The peer's kernel confirms, so a stopped program is not silent. Neither is one whose window is
// full: then only probes are sent, which its kernel answers. Unanswered probes are the only sign
// that an interface is down.
Pipe::Silence SocketPipe::silence() {
  tcp_info info{};
  socklen_t n_bytes = sizeof(info);
  if (getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &n_bytes) != 0) return {};
  const int64_t now = now_ns();
  if (info.tcpi_unacked == 0 && info.tcpi_probes == 0)
    first_unconfirmed_ns_ = 0;
  else if (first_unconfirmed_ns_ == 0)  // the kernel sent them after the last look
    first_unconfirmed_ns_ = now;
  Silence silence;
  silence.since_confirmed_ns = int64_t{info.tcpi_last_ack_recv} * kMillisecond;
  silence.usual_ns = (int64_t{info.tcpi_rtt} + 4 * int64_t{info.tcpi_rttvar}) * 1000;
  if (first_unconfirmed_ns_ != 0)
    silence.owed_ns = std::min(silence.since_confirmed_ns, now - first_unconfirmed_ns_);
  return silence;
}

int64_t SocketPipe::n_unconfirmed() const {
  int n_bytes = 0;
  return ioctl(fd_, SIOCOUTQ, &n_bytes) == 0 ? n_bytes : -1;
}

void SocketPipe::end(bool both) { shutdown(fd_, both ? SHUT_RDWR : SHUT_WR); }

}  // namespace shoal
