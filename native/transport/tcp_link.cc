#include "transport/tcp_link.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <new>

namespace shoal {
namespace {

// Read in one call beyond the frame at hand: small frames come many at a time.
constexpr size_t kReadAhead = 32u << 10;
// Payloads up to this size are copied into the queue; larger ones are borrowed.
constexpr size_t kCopied = 1u << 10;
constexpr int kMaxVectors = 32;
// One pump moves at most this much, so that one link cannot keep the lane from the others.
constexpr size_t kPumpBytes = 1u << 20;

}  // namespace

TcpLink::TcpLink(int peer, int fd, uint64_t epoch)
    : peer_(peer), fd_(fd), epoch_(epoch), ahead_(kReadAhead) {
  fcntl(fd_, F_SETFL, fcntl(fd_, F_GETFL) | O_NONBLOCK);
  const int on = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));  // no effect on a Unix socket
}

TcpLink::~TcpLink() { close(); }

void TcpLink::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
  queue_.clear();
}

void TcpLink::forsake() {
  if (fd_ >= 0) ::close(fd_);
}

// A socket that is closed while data lies unread in it is reset, and what the peer had not read yet
// is lost with it: perhaps the word of who died.
bool TcpLink::lingers() {
  if (fd_ < 0) return false;
  shutdown(fd_, SHUT_WR);
  for (;;) {
    const ssize_t n = read(fd_, ahead_.data(), ahead_.size());
    if (n > 0 || (n < 0 && errno == EINTR)) continue;
    return n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
  }
}

void TcpLink::fail(FrameSink& sink, const std::string& what) {
  if (fd_ < 0) return;
  close();
  sink.broken(peer_, {Fault::kPeerLost, peer_, what});
}

// What the peer sent is not to be read any further, but it can still be told why.
void TcpLink::refuse(FrameSink& sink, const std::string& what) {
  refused_ = true;
  in_payload_ = false;
  std::erase_if(queue_, [](const Queued& queued) { return queued.n_sent == 0; });
  sink.broken(peer_, {Fault::kPeerLost, peer_, what});
}

// ---- out

// A grant overtakes data that has not begun to leave: otherwise two ranks that send to each other
// would do so one after the other, the second once the first has sent all it was granted.
bool TcpLink::send(const Frame& frame) {
  if (fd_ < 0) return true;
  auto at = queue_.end();
  if (frame.header.type == FrameType::kGrant)
    while (at != queue_.begin() && std::prev(at)->is_data_at_rest()) --at;
  Queued& queued = *queue_.emplace(at);
  queued.frame = frame;
  if (frame.payload == nullptr) return true;
  if (frame.header.length > kCopied) return false;
  queued.owned.assign(frame.payload, frame.payload + frame.header.length);
  queued.frame.payload = nullptr;
  queued.frame.token = 0;
  return true;
}

// Checksums are taken just before the bytes leave, when the copy to the kernel finds them warm.
void TcpLink::seal(Queued& queued) {
  Header& header = queued.frame.header;
  header.epoch = epoch_;
  header.payload_crc = header.length == 0 ? 0 : crc32c(0, queued.payload(), header.length);
  header.header_crc = header.own_crc();
  queued.sealed = true;
}

bool TcpLink::flush(FrameSink& sink) {
  bool moved = false;
  while (fd_ >= 0 && !queue_.empty()) {
    iovec vectors[kMaxVectors];
    int n_vectors = 0;
    size_t wanted = 0;
    for (auto queued = queue_.begin();
         queued != queue_.end() && n_vectors + 2 <= kMaxVectors && wanted < kPumpBytes; ++queued) {
      if (!queued->sealed) seal(*queued);
      size_t skip = queued->n_sent;
      if (skip < sizeof(Header))
        vectors[n_vectors++] = {reinterpret_cast<std::byte*>(&queued->frame.header) + skip,
                                sizeof(Header) - skip};
      skip = skip < sizeof(Header) ? 0 : skip - sizeof(Header);
      if (skip < queued->frame.header.length)
        vectors[n_vectors++] = {const_cast<std::byte*>(queued->payload()) + skip,
                                queued->frame.header.length - skip};
      wanted += queued->size() - queued->n_sent;
    }
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = static_cast<size_t>(n_vectors);
    const ssize_t n = sendmsg(fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && errno == EINTR) continue;
    if (static_cast<ssize_t>(wanted) > n) n_full_++;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (n < 0) {
      // Reading tells more about why: a goodbye may still lie there. The end comes from pump().
      if (errno == EPIPE || errno == ECONNRESET) {
        queue_.clear();
        break;
      }
      fail(sink, std::string("could not be written to: ") + std::strerror(errno));
      break;
    }
    moved = true;
    // All is counted before anyone is told: the sink may send, and overtake what is at rest.
    size_t left = static_cast<size_t>(n);
    for (auto queued = queue_.begin(); left > 0; ++queued) {
      const size_t step = std::min(left, queued->size() - queued->n_sent);
      queued->n_sent += step;
      left -= step;
    }
    while (!queue_.empty() && queue_.front().n_sent == queue_.front().size()) {
      const uint64_t token = queue_.front().frame.token;
      const bool spoiled = queue_.front().is_spoiled();
      queue_.pop_front();
      if (token != 0 && !refused_) spoiled ? sink.spoiled(peer_, token) : sink.sent(peer_, token);
      if (fd_ < 0) return true;
    }
    if (static_cast<size_t>(n) < wanted) break;
  }
  for (auto queued = queue_.begin(); queued != queue_.end() && queued->sealed; ++queued)
    queued->waited = true;
  return moved;
}

LinkState TcpLink::state() const {
  LinkState state;
  state.n_queued = queue_.size();
  for (const Queued& queued : queue_) state.queued_bytes += queued.size() - queued.n_sent;
  state.n_full = n_full_;
  state.sockets = {state_of_socket(fd_)};
  return state;
}

// ---- in

bool TcpLink::pump(FrameSink& sink) {
  if (refused_) return false;
  bool moved = flush(sink);
  size_t budget = kPumpBytes;
  drained_ = false;
  while (fd_ >= 0 && !refused_ && !drained_ && budget > 0) {
    if (!read_some(sink)) break;
    moved = true;
    budget -= std::min(budget, kReadAhead);
    while (fd_ >= 0 && !refused_ && parse(sink)) {
    }
  }
  return moved;
}

// Reads the rest of the payload at hand straight to where it belongs, and what follows into ahead_.
// Less than asked for means that the socket is empty (epoll(7)); another read would only say so, or
// that it has ended.
bool TcpLink::read_some(FrameSink& sink) {
  if (ahead_begin_ > 0) {
    std::memmove(ahead_.data(), ahead_.data() + ahead_begin_, ahead_end_ - ahead_begin_);
    ahead_end_ -= ahead_begin_;
    ahead_begin_ = 0;
  }
  iovec vectors[2];
  int n_vectors = 0;
  const size_t rest = in_payload_ ? landing_.size() - n_landed_ : 0;
  if (rest > 0) vectors[n_vectors++] = {landing_.data() + n_landed_, rest};
  vectors[n_vectors++] = {ahead_.data() + ahead_end_, ahead_.size() - ahead_end_};
  const size_t wanted = rest + ahead_.size() - ahead_end_;
  const ssize_t n = readv(fd_, vectors, n_vectors);
  if (n < 0 && errno == EINTR) return false;
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    drained_ = true;
    return false;
  }
  if (n <= 0) {
    fail(sink, n == 0 || errno == ECONNRESET
                   ? "closed the connection without a goodbye (its process died, or its host)"
                   : std::string("could not be read from: ") + std::strerror(errno));
    return false;
  }
  const size_t landed = std::min(rest, static_cast<size_t>(n));
  n_landed_ += landed;
  drained_ = static_cast<size_t>(n) < wanted && !ending_;
  ahead_end_ += static_cast<size_t>(n) - landed;
  return true;
}

// One move forward with the bytes at hand; false when more must be read first.
bool TcpLink::parse(FrameSink& sink) {
  if (!in_payload_) return begin_frame(sink);
  const size_t here = std::min(landing_.size() - n_landed_, ahead_end_ - ahead_begin_);
  if (here > 0) {
    std::memcpy(landing_.data() + n_landed_, ahead_.data() + ahead_begin_, here);
    n_landed_ += here;
    ahead_begin_ += here;
  }
  return n_landed_ == landing_.size() && end_frame(sink);
}

bool TcpLink::begin_frame(FrameSink& sink) {
  if (ahead_end_ - ahead_begin_ < sizeof(Header)) return false;
  std::memcpy(&header_, ahead_.data() + ahead_begin_, sizeof(Header));
  if (header_.magic != Header::kMagic || header_.version != Header::kVersion ||
      header_.header_crc != header_.own_crc()) {
    refuse(sink, "sent a corrupt header (wrong magic, version or checksum)");
    return false;
  }
  if (header_.epoch != epoch_) {
    refuse(sink, "sent a frame of another epoch");
    return false;
  }
  if (header_.length > Header::kMaxPayload) {
    refuse(sink, "announced a payload of " + std::to_string(header_.length) + " B; at most " +
                     std::to_string(Header::kMaxPayload) + " are allowed");
    return false;
  }
  // The header counts as read once there is a place for what follows: finding one may throw.
  landing_ = header_.length == 0 ? std::span<std::byte>() : sink.landing(peer_, header_);
  if (landing_.size() != header_.length) {
    refuse(sink, "sent a frame of " + std::to_string(header_.length) + " B that nobody expects");
    return false;
  }
  ahead_begin_ += sizeof(Header);
  n_landed_ = 0;
  in_payload_ = true;
  return true;
}

bool TcpLink::end_frame(FrameSink& sink) {
  in_payload_ = false;
  if (header_.length > 0 && crc32c(0, landing_.data(), landing_.size()) != header_.payload_crc) {
    refuse(sink,
           "sent a corrupt payload (" + std::to_string(header_.length) +
               " B, checksum does not match): the network damaged it, or its program wrote to "
               "the memory of a call in flight");
    return false;
  }
  const std::vector<std::byte> keep = std::move(diverted_);
  diverted_.clear();
  sink.arrived(peer_, header_, landing_);
  return true;
}

void TcpLink::disown(const std::byte* from, size_t n_bytes) {
  try {
    let_go(from, n_bytes);
  } catch (const std::bad_alloc&) {
    // Without memory for a copy of what is half sent or half here, the connection is of no use; the
    // kernel tells of its end.
    queue_.clear();
    in_payload_ = false;
    if (fd_ >= 0) shutdown(fd_, SHUT_RDWR);
  }
}

void TcpLink::let_go(const std::byte* from, size_t n_bytes) {
  const auto inside = [&](const std::byte* at) { return at >= from && at < from + n_bytes; };
  for (auto queued = queue_.begin(); queued != queue_.end();) {
    if (queued->frame.payload == nullptr || !inside(queued->frame.payload)) {
      ++queued;
    } else if (queued->n_sent == 0) {
      queued = queue_.erase(queued);
    } else {
      queued->owned.assign(queued->frame.payload,
                           queued->frame.payload + queued->frame.header.length);
      queued->frame.payload = nullptr;
      queued->frame.token = 0;
      ++queued;
    }
  }
  if (in_payload_ && !landing_.empty() && inside(landing_.data())) {
    diverted_.assign(landing_.begin(), landing_.end());
    landing_ = diverted_;
  }
}

}  // namespace shoal
