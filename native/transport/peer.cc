#include "transport/peer.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "transport/address.h"
#include "transport/handshake.h"

namespace shoal {
namespace {

constexpr size_t kNumberBytes = sizeof(uint64_t);
constexpr size_t kAtOnce = 1 << 16;        // bytes of a frame that have memory before they arrive
constexpr int64_t kHeldNs = kMillisecond;  // before a descriptor is passed again
// TCP keepalive, in seconds. The kernel's own would keep the connection of a machine that lost its
// power for two hours, and a server the place of its job.
constexpr int kAskAfterS = 10;
constexpr int kUnanswered = 3;

struct Head {
  std::array<char, 8> magic{};
  uint16_t version = 0;
  uint16_t kind = 0;
  uint32_t n_bytes = 0;  // of the body
};
static_assert(sizeof(Head) == Peer::kHeadBytes);

std::array<char, 8> magic() {
  std::array<char, 8> name{};
  std::ranges::copy(kHandshakeMagic, name.begin());
  return name;
}

void put(std::vector<std::byte>& to, Bytes bytes) {
  to.insert(to.end(), bytes.begin(), bytes.end());
}

template <class Value>
void put_value(std::vector<std::byte>& to, const Value& value) {
  put(to, std::as_bytes(std::span(&value, 1)));
}

// The MAC of one direction's frames.
Secret key_of(const Secret& session, bool of_caller) {
  const std::string_view use = of_caller ? "frames of the caller" : "frames of the called";
  return Secret(hmac_sha256(session.bytes(), std::as_bytes(std::span(use))));
}

}  // namespace

Peer::Peer(int epoll_fd, uint64_t tag, int fd, const Secret& session, bool is_caller,
           size_t most_queued, int64_t patience_ns)
    : epoll_fd_(epoll_fd),
      tag_(tag),
      fd_(fd),
      is_local_(Address::family_of(fd) == AF_UNIX),
      most_queued_(most_queued),
      patience_ns_(patience_ns),
      send_key_(key_of(session, is_caller)),
      receive_key_(key_of(session, !is_caller)) {
  const int on = 1;
  if (!is_local_) {
    for (const auto& [option, value] : {std::pair(TCP_NODELAY, on),
                                        {TCP_KEEPIDLE, kAskAfterS},
                                        {TCP_KEEPINTVL, kAskAfterS},
                                        {TCP_KEEPCNT, kUnanswered}})
      setsockopt(fd, IPPROTO_TCP, option, &value, sizeof(value));
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  }
  watch();
}

Peer::~Peer() { close(); }

void Peer::expect(uint16_t kind, size_t most_bytes, bool takes_fd) {
  expected_[kind] = {most_bytes, takes_fd};
}

void Peer::pause(bool is_paused) {
  if (is_paused == is_paused_) return;
  is_paused_ = is_paused;
  if (!is_paused) stuck_until_ = now_ns() + patience_ns_;
  watch();
}

void Peer::close() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  drop_all();
}

void Peer::drop_all() {
  for (const Queued& one : outbox_)
    if (one.is_owned) ::close(one.passed);
  outbox_.clear();
  n_queued_ = 0;
  held_until_ = stuck_until_ = INT64_MAX;
  if (passed_ >= 0) ::close(std::exchange(passed_, -1));
}

// The endpoint is notified by an event: the socket reports its end.
void Peer::lose(int error, std::string why) {
  if (is_lost()) return;
  error_ = error;
  why_ = why.empty() ? std::strerror(error) : std::move(why);
  shutdown(fd_, SHUT_RDWR);
  drop_all();
}

void Peer::watch() {
  if (fd_ < 0) return;
  epoll_event event{};
  event.data.u64 = tag_;
  if (!is_paused_) event.events |= EPOLLIN;
  if (!outbox_.empty() && held_until_ == INT64_MAX) event.events |= EPOLLOUT;
  if (event.events == events_) return;
  const int change = events_ == UINT32_MAX ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;
  events_ = event.events;
  if (epoll_ctl(epoll_fd_, change, fd_, &event) != 0) lose(errno, "");
}

std::optional<Frame> Peer::step(int64_t now, bool has_ended) {
  if (fd_ < 0) return std::nullopt;
  const size_t n_before = n_queued_ + inbox_.size();
  if (now >= held_until_ || has_ended) held_until_ = INT64_MAX;
  if (held_until_ == INT64_MAX) flush();
  if (is_paused_ && has_ended) lose(ECONNRESET, "it closed the connection");
  std::optional<Frame> frame = is_paused_ || is_lost() ? std::nullopt : read();
  if (!is_lost()) lose_stuck(now, frame || n_queued_ + inbox_.size() != n_before);
  return frame;
}

void Peer::lose_stuck(int64_t now, bool has_moved) {
  const bool is_amid = n_queued_ > 0 || (!is_paused_ && inbox_.size() > kNumberBytes);
  if (!is_amid)
    stuck_until_ = INT64_MAX;
  else if (has_moved || stuck_until_ == INT64_MAX)
    stuck_until_ = now + patience_ns_;
  else if (now >= stuck_until_)
    lose(ETIMEDOUT, "stopped in the middle of a message");
}

// ---- sending

bool Peer::send(uint16_t kind, Bytes body, int passed) {
  if (!is_open()) return false;
  if (body.size() > most_queued_ || n_queued_ > most_queued_ - body.size()) {
    lose(ENOBUFS, "does not read the data sent to it");
    return false;
  }
  Queued frame;
  frame.bytes.reserve(kNumberBytes + kFrameBytes + body.size());
  put_value(frame.bytes, n_sent_);
  put_value(frame.bytes,
            Head{magic(), kHandshakeVersion, kind, static_cast<uint32_t>(body.size())});
  put(frame.bytes, body);
  put_value(frame.bytes, hmac_sha256(send_key_.bytes(), frame.bytes));
  frame.at = kNumberBytes;
  frame.passed = passed;
  n_queued_ += frame.bytes.size() - frame.at;
  outbox_.push_back(std::move(frame));
  ++n_sent_;
  if (outbox_.size() == 1) flush();
  if (!outbox_.empty() && stuck_until_ == INT64_MAX) stuck_until_ = now_ns() + patience_ns_;
  return keep_passed() && !is_lost();
}

// A descriptor that could not be passed at once: the caller may close its own.
bool Peer::keep_passed() {
  if (outbox_.empty()) return true;
  Queued& last = outbox_.back();
  if (last.passed < 0 || last.is_owned) return true;
  last.passed = fcntl(last.passed, F_DUPFD_CLOEXEC, 0);
  last.is_owned = last.passed >= 0;
  if (!last.is_owned) lose(errno, "");
  return last.is_owned;
}

void Peer::flush() {
  while (!outbox_.empty() && !is_lost()) {
    Queued& first = outbox_.front();
    iovec data{first.bytes.data() + first.at, first.bytes.size() - first.at};
    alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> room{};
    msghdr message{};
    message.msg_iov = &data;
    message.msg_iovlen = 1;
    if (first.passed >= 0) {
      message.msg_control = room.data();
      message.msg_controllen = room.size();
      cmsghdr* const head = CMSG_FIRSTHDR(&message);
      head->cmsg_level = SOL_SOCKET;
      head->cmsg_type = SCM_RIGHTS;
      head->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(head), &first.passed, sizeof(int));
    }
    const ssize_t n = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (n < 0 && errno == ETOOMANYREFS) {  // too many descriptors are in flight
      held_until_ = now_ns() + kHeldNs;
      break;
    }
    if (n < 0) return lose(errno, "");
    if (first.is_owned) ::close(first.passed);
    first.passed = -1;
    first.is_owned = false;
    first.at += static_cast<size_t>(n);
    n_queued_ -= static_cast<size_t>(n);
    if (first.at == first.bytes.size()) outbox_.pop_front();
  }
  watch();
}

// ---- reading

// Never beyond the frame: a descriptor read with the bytes then belongs to this frame.
std::optional<Frame> Peer::read() {
  while (!is_lost()) {
    if (inbox_.empty()) put_value(inbox_, n_read_);
    const size_t n_wanted = n_frame_ > 0 ? n_frame_ : kHeadBytes;
    const size_t n_there = inbox_.size() - kNumberBytes;
    if (n_there < n_wanted) {
      if (!receive(std::min(n_wanted - n_there, kAtOnce))) break;
    } else if (n_frame_ == 0) {
      if (!take_head()) break;
    } else {
      return take_frame();
    }
  }
  return std::nullopt;
}

// True if bytes have arrived.
bool Peer::receive(size_t n_bytes) {
  const size_t n_before = inbox_.size();
  inbox_.resize(n_before + n_bytes);
  iovec data{inbox_.data() + n_before, n_bytes};
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> room{};
  msghdr message{};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  message.msg_control = room.data();
  message.msg_controllen = room.size();
  const ssize_t n = recvmsg(fd_, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  const int error = errno;
  inbox_.resize(n_before + static_cast<size_t>(std::max<ssize_t>(n, 0)));
  if (n < 0 && error == EINTR) return true;
  if (n < 0 && (error == EAGAIN || error == EWOULDBLOCK)) return false;
  if (n < 0) return lose(error, ""), false;
  if (!take_passed(message)) return false;
  if (n == 0) return lose(ECONNRESET, "it closed the connection"), false;
  return true;
}

bool Peer::take_passed(const msghdr& message) {
  msghdr copy = message;  // CMSG_NXTHDR takes no constant
  bool is_right = true;
  for (cmsghdr* head = CMSG_FIRSTHDR(&copy); head != nullptr; head = CMSG_NXTHDR(&copy, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = CMSG_LEN(0); at + sizeof(int) <= head->cmsg_len; at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, reinterpret_cast<const char*>(head) + at, sizeof(int));
      is_right &= passed_ < 0;
      if (passed_ < 0)
        passed_ = fd;
      else
        ::close(fd);
    }
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) lose(EMFILE, "");
  if (!is_right) lose(EPROTO, "it spoke out of turn");
  return !is_lost();
}

bool Peer::take_head() {
  Head head;
  std::memcpy(&head, inbox_.data() + kNumberBytes, sizeof(head));
  const auto expected = expected_.find(head.kind);
  if (head.magic != magic() || head.version != kHandshakeVersion || expected == expected_.end()) {
    lose(EPROTO, "it spoke out of turn");
    return false;
  }
  if (head.n_bytes > expected->second.most_bytes) {
    lose(EPROTO, "it announced a message of " + std::to_string(head.n_bytes) + " bytes");
    return false;
  }
  n_frame_ = kFrameBytes + head.n_bytes;
  return true;
}

std::optional<Frame> Peer::take_frame() {
  const Bytes whole(inbox_);
  const Bytes sealed = whole.first(whole.size() - sizeof(Digest));
  if (!is_same(whole.last(sizeof(Digest)), hmac_sha256(receive_key_.bytes(), sealed))) {
    lose(ECONNRESET, "its message was damaged in transit");
    return std::nullopt;
  }
  Head head;
  std::memcpy(&head, whole.data() + kNumberBytes, sizeof(head));
  if (passed_ >= 0 && !expected_[head.kind].takes_fd) {
    lose(EPROTO, "it spoke out of turn");
    return std::nullopt;
  }
  const Bytes body = sealed.subspan(kNumberBytes + kHeadBytes);
  Frame frame{head.kind, {body.begin(), body.end()}, -1};
  frame.fd = std::exchange(passed_, -1);
  inbox_.clear();
  n_frame_ = 0;
  ++n_read_;
  return frame;
}

}  // namespace shoal
