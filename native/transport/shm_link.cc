#include "transport/shm_link.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

namespace shoal {
namespace {

constexpr size_t kLine = 64;  // records start on cache lines
constexpr uint8_t kPadding = 0;

size_t padded(size_t n_bytes) { return (n_bytes + kLine - 1) / kLine * kLine; }

// Data counts towards what a sleeper waits for. What ends something cannot wait for the next call.
Ring how_to_ring(FrameType type) {
  switch (type) {
    case FrameType::kData:
      return Ring::kCounted;
    case FrameType::kAbort:
    case FrameType::kLost:
    case FrameType::kDisagree:
    case FrameType::kGoodbye:
    case FrameType::kAsk:
    case FrameType::kAnswer:
    case FrameType::kUnmade:
      return Ring::kAlways;
    default:
      return Ring::kNow;
  }
}

// What crosses the Unix socket: a header and a place, always both.
struct Note {
  Header header;
  Place place;
};

}  // namespace

ShmLink::ShmLink(int peer, const Arena& own, int own_local, int peer_local, int socket_fd,
                 int event_fd, uint64_t epoch)
    : peer_(peer),
      own_local_(own_local),
      inbound_(&own.ring(peer_local)),
      inbound_data_(own.ring_data(peer_local)),
      socket_fd_(socket_fd),
      event_fd_(event_fd),
      epoch_(epoch) {
  fcntl(socket_fd_, F_SETFL, fcntl(socket_fd_, F_GETFL) | O_NONBLOCK);
}

ShmLink::~ShmLink() { close(); }

Error ShmLink::open(int memory_fd, int n_local) {
  Error error = Arena::open(memory_fd, n_local, theirs_);
  ::close(memory_fd);
  return error;
}

Error ShmLink::connect(const Site& site, const PeerSockets& peer, std::unique_ptr<Link>& out) {
  const auto position = [&](int rank) {
    const auto at = std::lower_bound(site.local.begin(), site.local.end(), rank);
    return static_cast<int>(at - site.local.begin());
  };
  auto link =
      std::make_unique<ShmLink>(peer.rank, site.arena, position(site.rank), position(peer.rank),
                                peer.fds[0], peer.event_fd, site.epoch);
  Error error = link->open(peer.memory_fd, static_cast<int>(site.local.size()));
  out = std::move(link);
  return error;
}

void ShmLink::close() {
  if (closed_) return;
  closed_ = true;
  queue_.clear();
  ::close(socket_fd_);
  ::close(event_fd_);
}

void ShmLink::forsake() {
  if (closed_) return;
  ::close(socket_fd_);
  ::close(event_fd_);
}

void ShmLink::fail(FrameSink& sink, const std::string& what, bool of_path) {
  if (closed_) return;
  close();
  sink.broken(peer_, {Fault::kPeerLost, peer_, what, {}, of_path});
}

// ---- out

bool ShmLink::send(const Frame& frame) {
  if (closed_) return true;
  if (queue_.empty() && push(frame)) return true;
  queue_.push_back(frame);
  return frame.payload == nullptr;
}

// Whether a record of this size fits into the peer's ring now. If not, the peer is to tell when it
// has read some of it, and to do that soon.
bool ShmLink::find_room(size_t size) {
  RingHeader& ring = theirs_.ring(own_local_);
  const size_t to_end = Arena::kRingBytes - head_ % Arena::kRingBytes;
  const size_t needed = size <= to_end ? size : to_end + size;  // records never wrap round the end
  const auto has_room = [&] {
    const uint64_t tail = ring.tail.load();
    return head_ - tail + needed <= Arena::kRingBytes;
  };
  if (has_room()) return true;
  n_full_++;
  if (ring.is_full.exchange(1) == 0) how_ = Ring::kAlways;
  return has_room();  // it may have read it all before it could see the mark
}

// Copies a frame into the peer's ring. False when there is no room.
bool ShmLink::push(const Frame& frame) {
  const size_t size = sizeof(Header) + padded(frame.header.length);
  if (!find_room(size)) return false;
  RingHeader& ring = theirs_.ring(own_local_);
  std::byte* data = theirs_.ring_data(own_local_);
  const size_t at = head_ % Arena::kRingBytes;
  const size_t to_end = Arena::kRingBytes - at;
  if (size > to_end) {
    Header padding;
    padding.type = static_cast<FrameType>(kPadding);
    padding.length = static_cast<uint32_t>(to_end - sizeof(Header));
    std::memcpy(data + at, &padding, sizeof(Header));
    head_ += to_end;
  }
  std::byte* to = data + head_ % Arena::kRingBytes;
  std::memcpy(to, &frame.header, sizeof(Header));
  if (frame.header.length > 0) std::memcpy(to + sizeof(Header), frame.bytes(), frame.header.length);
  head_ += size;
  ring.head.store(head_, std::memory_order_release);
  n_pushed_++;
  how_ = std::max(how_, how_to_ring(frame.header.type));
  return true;
}

void ShmLink::ring_bell() {
  if (closed_ || (n_pushed_ == 0 && how_ == Ring::kCounted)) return;
  theirs_.ring_bell(event_fd_, std::exchange(n_pushed_, 0), std::exchange(how_, Ring::kCounted));
}

bool ShmLink::flush(FrameSink& sink) {
  bool moved = false;
  while (!closed_ && !queue_.empty() && push(queue_.front())) {
    const uint64_t token = queue_.front().payload == nullptr ? 0 : queue_.front().token;
    queue_.pop_front();
    moved = true;
    if (token != 0) sink.sent(peer_, token);
  }
  moved |= n_pushed_ > 0;
  ring_bell();
  return moved;
}

LinkState ShmLink::state() const {
  LinkState state;
  state.n_queued = queue_.size();
  for (const Frame& frame : queue_) state.queued_bytes += sizeof(Header) + frame.header.length;
  state.n_full = n_full_;
  return state;
}

bool ShmLink::release(uint64_t, const std::byte* from, size_t n_bytes) {
  std::erase_if(queue_, [&](const Frame& frame) {
    return frame.payload != nullptr && frame.payload >= from && frame.payload < from + n_bytes;
  });
  return true;
}

// ---- in

bool ShmLink::pump(FrameSink& sink) {
  const bool moved = flush(sink);
  return deliver(sink) || moved;
}

// Delivers what lies in the ring now. The peer's numbers are checked, never trusted.
bool ShmLink::deliver(FrameSink& sink) {
  bool moved = false;
  const uint64_t upto = inbound_->head.load(std::memory_order_acquire);
  uint64_t tail = inbound_->tail.load(std::memory_order_relaxed);
  if (upto - tail > Arena::kRingBytes || (upto | tail) % kLine != 0) {
    fail(sink, "wrote past the end of its ring, or between its lines");
    return true;
  }
  while (!closed_ && tail != upto) {
    const size_t at = tail % Arena::kRingBytes;
    Header header;
    std::memcpy(&header, inbound_data_ + at, sizeof(Header));
    const size_t size = sizeof(Header) + padded(header.length);
    const bool padding = static_cast<uint8_t>(header.type) == kPadding;
    if (header.seal != Header::kUnsealed || header.version != Header::kVersion ||
        size > upto - tail || size > Arena::kRingBytes - at ||
        (!padding && header.length > Arena::kMaxInline)) {
      fail(sink, "wrote a corrupt record into its ring");
      return true;
    }
    const auto take = [&] {
      tail += size;
      inbound_->tail.store(tail, std::memory_order_release);
    };
    try {
      if (!padding)
        sink.arrived(peer_, header,
                     {const_cast<std::byte*>(inbound_data_) + at + sizeof(Header), header.length});
    } catch (const std::bad_alloc&) {  // NOT to come again
      take();
      throw;
    }
    take();
    moved = true;
  }
  // The exchange comes after the stores above for everyone: either the producer, which marks the
  // ring and then looks again, sees the room, or its mark is seen here.
  if (moved && !closed_ && inbound_->is_full.exchange(0) != 0)
    theirs_.ring_bell(event_fd_, 0, Ring::kAlways);
  return moved;
}

// ---- regions and the socket

bool ShmLink::tell(FrameType type, const Place& place, int fd) {
  Note note;
  note.header.type = type;
  note.header.group = epoch_;
  note.header.length = sizeof(Place);
  note.place = place;
  iovec vector{&note, sizeof(note)};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &vector;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* rider = CMSG_FIRSTHDR(&message);
    rider->cmsg_level = SOL_SOCKET;
    rider->cmsg_type = SCM_RIGHTS;
    rider->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rider), &fd, sizeof(int));
  }
  return sendmsg(socket_fd_, &message, MSG_NOSIGNAL | MSG_DONTWAIT) ==
         static_cast<ssize_t>(sizeof(note));
}

bool ShmLink::share(uint32_t id) {
  if (closed_) return false;
  if (shared_.count(id) != 0) return true;
  const auto region = Regions::of_process().with_id(id);
  if (region.id == 0 || !tell(FrameType::kRegion, {id, 0, region.size}, region.fd)) return false;
  shared_.insert(id);
  return true;
}

void ShmLink::release_regions() {
  if (closed_) return;
  for (auto id = shared_.begin(); id != shared_.end();) {
    const bool gone = Regions::of_process().with_id(*id).id == 0;
    id = gone && tell(FrameType::kRelease, {*id, 0, 0}, -1) ? shared_.erase(id) : std::next(id);
  }
}

void ShmLink::take_region(const Place& place, int fd) {
  struct stat stat{};
  Mapping mapping;
  // -1: this process had no descriptor left for it.
  const bool fits =
      fd >= 0 && fstat(fd, &stat) == 0 && static_cast<uint64_t>(stat.st_size) == place.offset;
  // A region that cannot be mapped here stays unknown; the call that needs it will say so.
  if (fits && !Mapping::map(fd, place.offset, mapping)) regions_[place.region] = std::move(mapping);
}

// Reads the notes that lie in the socket.
ShmLink::Notes ShmLink::take_notes() {
  Notes result = Notes::kNone;
  while (!closed_) {
    Note note;
    iovec vector{&note, sizeof(note)};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &vector;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t n = recvmsg(socket_fd_, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return result;
    if (n <= 0) return Notes::kEnded;
    int fd = -1;
    const cmsghdr* rider = CMSG_FIRSTHDR(&message);
    if (rider != nullptr && rider->cmsg_type == SCM_RIGHTS)
      std::memcpy(&fd, CMSG_DATA(rider), sizeof(int));
    const bool whole = n == static_cast<ssize_t>(sizeof(note)) &&
                       note.header.seal == Header::kUnsealed && note.header.group == epoch_;
    result = Notes::kTaken;
    if (whole && note.header.type == FrameType::kRegion)
      take_region(note.place, fd);
    else if (whole && note.header.type == FrameType::kRelease)
      regions_.erase(note.place.region);
    else
      result = Notes::kCorrupt;
    if (fd >= 0) ::close(fd);
    if (result == Notes::kCorrupt) return result;
  }
  return result;
}

bool ShmLink::on_event(FrameSink& sink, bool) {
  const Notes notes = take_notes();
  if (notes == Notes::kEnded) {
    deliver(sink);  // what it still said, perhaps a goodbye
    fail(sink, "closed the connection without a goodbye (its process died, or its host)", true);
  }
  if (notes == Notes::kCorrupt) fail(sink, "sent a corrupt note over its socket");
  return notes != Notes::kNone;
}

// ---- the peer's memory

// Where that lies in this process; nullptr if the region is not mapped here or ends before. One
// that is not known yet is looked for in the socket: its descriptor was sent before anything that
// names it.
std::byte* ShmLink::address_of(const Remote& there, size_t n_bytes) {
  auto found = regions_.find(there.place);
  if (found == regions_.end() && take_notes() == Notes::kTaken) found = regions_.find(there.place);
  if (found == regions_.end()) return nullptr;
  const Mapping& mapping = found->second;
  const bool fits = there.offset <= mapping.size() && n_bytes <= mapping.size() - there.offset;
  return fits ? mapping.data() + there.offset : nullptr;
}

Moved ShmLink::put(uint64_t, const std::byte* from, size_t n_bytes, const Remote& to) {
  std::byte* at = address_of(to, n_bytes);
  if (at == nullptr) return Moved::kNowhere;
  std::memcpy(at, from, n_bytes);
  return Moved::kDone;
}

Moved ShmLink::get(uint64_t, const Remote& from, const Into& into) {
  if (from.in_slot) {
    if (from.place >= theirs_.n_slots() || into.n_bytes > Slots::kSlotBytes) return Moved::kNowhere;
    const std::byte* slot = theirs_.slots() + from.place * Slots::kSlotBytes;
    return Slots::read(slot, theirs_.stamps()[from.place], from.offset, into);
  }
  const std::byte* at = address_of(from, into.n_bytes);
  if (at == nullptr) return Moved::kNowhere;
  into.take(at);
  return Moved::kDone;
}

}  // namespace shoal
