#include "transport/shm_link.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace shoal {
namespace {

constexpr size_t kLine = 64;  // records start on cache lines
constexpr uint8_t kPadding = 0;

size_t padded(size_t n_bytes) { return (n_bytes + kLine - 1) / kLine * kLine; }

// Data counts towards the frames a sleeper waits for. A frame that ends something cannot wait for
// the next call.
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

}  // namespace

ShmLink::ShmLink(int peer, Arena& own, int peer_local)
    : peer_(peer),
      own_(own),
      peer_local_(peer_local),
      inbound_(&own.ring(peer_local)),
      inbound_data_(own.ring_data(peer_local)) {}

ShmLink::~ShmLink() {
  close();
  own_.forget_regions(peer_local_);
}

Error ShmLink::connect(const Site& site, const PeerPlace& peer, std::unique_ptr<Link>& out) {
  const auto at = std::lower_bound(site.local.begin(), site.local.end(), peer.rank);
  const auto local = static_cast<int>(at - site.local.begin());
  if (static_cast<int>(site.local.size()) != site.arena.n_local())
    return {Fault::kInternal, peer.rank, "the memory of this host is for another number of ranks"};
  auto link = std::make_unique<ShmLink>(peer.rank, site.arena, local);
  Error error = link->open();
  error.peer = peer.rank;
  out = std::move(link);
  return error;
}

Error ShmLink::open() {
  Error error = own_.mate(peer_local_, theirs_);
  closed_ = static_cast<bool>(error);
  return error;
}

void ShmLink::close() {
  if (closed_) return;
  closed_ = true;
  queue_.clear();
  theirs_.ring(own_.local()).is_over.store(1);
  theirs_.ring_bell(own_.doorbell_socket(), 0, Ring::kAlways);
}

void ShmLink::fail(FrameSink& sink, const std::string& what, bool of_path) {
  if (closed_) return;
  const Error error = {Fault::kPeerLost, peer_, what, {}, of_path};  // first: it may throw
  close();
  sink.broken(peer_, error);
}

// ---- out

bool ShmLink::send(const Frame& frame) {
  if (closed_) return true;
  if (queue_.empty() && push(frame)) return true;
  queue_.push_back(frame);
  return frame.payload == nullptr;
}

// True if a record of this size fits into the peer's ring now. If not, ask the peer to ring when it
// has read some, and wake it.
bool ShmLink::find_room(size_t size) {
  RingHeader& ring = theirs_.ring(own_.local());
  const size_t ring_bytes = theirs_.ring_bytes();
  const size_t to_end = ring_bytes - head_ % ring_bytes;
  const size_t needed = size <= to_end ? size : to_end + size;  // records never wrap round the end
  const auto has_room = [&] {
    const uint64_t tail = ring.tail.load();
    return head_ - tail + needed <= ring_bytes;
  };
  if (has_room()) return true;
  n_full_++;
  if (ring.is_full.exchange(1) == 0) how_ = Ring::kAlways;
  return has_room();  // the peer may have read everything before it could see the mark
}

// Copy a frame into the peer's ring. False if there is no room.
bool ShmLink::push(const Frame& frame) {
  const size_t size = sizeof(Header) + padded(frame.header.length);
  if (!find_room(size)) return false;
  RingHeader& ring = theirs_.ring(own_.local());
  std::byte* data = theirs_.ring_data(own_.local());
  const size_t ring_bytes = theirs_.ring_bytes();
  const size_t at = head_ % ring_bytes;
  const size_t to_end = ring_bytes - at;
  if (size > to_end) {
    Header padding;
    padding.type = static_cast<FrameType>(kPadding);
    padding.length = static_cast<uint32_t>(to_end - sizeof(Header));
    std::memcpy(data + at, &padding, sizeof(Header));
    head_ += to_end;
  }
  std::byte* to = data + head_ % ring_bytes;
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
  theirs_.ring_bell(own_.doorbell_socket(), std::exchange(n_pushed_, 0),
                    std::exchange(how_, Ring::kCounted));
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

bool ShmLink::release(uint64_t, const CallId& call) {
  std::erase_if(queue_, [&](const Frame& frame) { return frame.is_lent_by(call); });
  return true;
}

// ---- in

bool ShmLink::pump(FrameSink& sink) {
  const bool moved = flush(sink);
  return deliver(sink) || moved;
}

// Deliver the frames in the ring, and notice its end.
bool ShmLink::deliver(FrameSink& sink) {
  const bool is_over = inbound_->is_over.load() != 0;  // read before the head
  const uint64_t upto = inbound_->head.load(std::memory_order_acquire);
  uint64_t tail = inbound_->tail.load(std::memory_order_relaxed);
  if (upto - tail > own_.ring_bytes() || (upto | tail) % kLine != 0) {
    fail(sink, "wrote past the end of its ring, or between its lines");
    return true;
  }
  bool moved = false;
  while (!closed_ && tail != upto) {
    if (!take_record(sink, upto, tail)) {
      fail(sink, "wrote a corrupt record into its ring");
      return true;
    }
    moved = true;
  }
  if (moved) tell_of_room();
  if (is_over && !closed_) {
    fail(sink, "closed the connection without a goodbye", true);
    return true;
  }
  return moved;
}

// The exchange comes after the stores of the tail for everyone: either the producer, which marks
// the ring and then looks again, sees the room, or its mark is seen here.
void ShmLink::tell_of_room() {
  if (!closed_ && inbound_->is_full.exchange(0) != 0)
    theirs_.ring_bell(own_.doorbell_socket(), 0, Ring::kAlways);
}

// Deliver the record at `tail` and advance it. False if there is no valid record. Every number that
// the peer wrote is checked.
bool ShmLink::take_record(FrameSink& sink, uint64_t upto, uint64_t& tail) {
  const size_t at = tail % own_.ring_bytes();
  Header header;
  std::memcpy(&header, inbound_data_ + at, sizeof(Header));
  const size_t size = sizeof(Header) + padded(header.length);
  const bool padding = static_cast<uint8_t>(header.type) == kPadding;
  if (header.seal != Header::kUnsealed || header.version != Header::kVersion ||
      size > upto - tail || size > own_.ring_bytes() - at ||
      (!padding && header.length > max_inline()))
    return false;
  const auto take = [&] {
    tail += size;
    inbound_->tail.store(tail, std::memory_order_release);
  };
  try {
    if (!padding)
      sink.arrived(peer_, header,
                   {const_cast<std::byte*>(inbound_data_) + at + sizeof(Header), header.length});
  } catch (const std::bad_alloc&) {  // the frame cannot be delivered again
    take();
    tell_of_room();
    throw;
  }
  take();
  return true;
}

void ShmLink::look(FrameSink& sink, int64_t) {
  if (closed_ || !theirs_.has_died()) return;
  deliver(sink);  // its last frames, perhaps a goodbye
  fail(sink, "ended without a goodbye: its process died", true);
}

// ---- regions

bool ShmLink::send_note(FrameType type, const Place& place, int fd) {
  Note note;
  note.header.type = type;
  note.header.flow = static_cast<uint32_t>(own_.local());
  note.header.length = sizeof(Place);
  note.place = place;
  const ArenaHeader& there = theirs_.header();
  return own_.doorbell_socket().hand_over(there.doorbell_address, note, fd, there.life);
}

bool ShmLink::share(uint32_t id) {
  if (closed_) return false;
  if (shared_.count(id) != 0) return true;
  const auto region = Regions::of_process().with_id(id);
  if (region.id == 0 || !send_note(FrameType::kRegion, {id, 0, region.size}, region.fd))
    return false;
  shared_.insert(id);
  return true;
}

void ShmLink::release_regions() {
  if (closed_) return;
  for (auto id = shared_.begin(); id != shared_.end();) {
    const bool gone = Regions::of_process().with_id(*id).id == 0;
    id =
        gone && send_note(FrameType::kRelease, {*id, 0, 0}, -1) ? shared_.erase(id) : std::next(id);
  }
}

// ---- the peer's memory

// The address of the peer's memory in this process; null if the region is not mapped here or is too
// short. A region that is not known yet is looked for in the doorbell socket: its descriptor was
// sent before any frame that names it.
std::byte* ShmLink::address_of(const Remote& there, size_t n_bytes) {
  if (own_.region(peer_local_, there.place) == nullptr) own_.take_notes(false);
  const Mapping* mapping = own_.region(peer_local_, there.place);
  if (mapping == nullptr) return nullptr;
  const bool fits = there.offset <= mapping->size() && n_bytes <= mapping->size() - there.offset;
  return fits ? mapping->data() + there.offset : nullptr;
}

Moved ShmLink::put(uint64_t, const CallId&, const std::byte* from, size_t n_bytes,
                   const Remote& to) {
  std::byte* at = address_of(to, n_bytes);
  if (at == nullptr) return Moved::kNowhere;
  std::memcpy(at, from, n_bytes);
  return Moved::kDone;
}

Moved ShmLink::get(uint64_t, const CallId&, const Remote& from, const Into& into) {
  if (from.in_slot) {
    if (from.place >= theirs_.n_slots() || into.n_bytes > Slots::kSlotBytes) return Moved::kNowhere;
    const std::byte* slot = theirs_.slots() + from.place * Slots::kSlotBytes;
    return Slots::read(slot, theirs_.stamps()[from.place], from.offset, into);
  }
  const std::byte* at = address_of(from, into.n_bytes);
  if (at == nullptr) {
    const bool is_known = own_.region(peer_local_, from.place) != nullptr;
    return is_known || own_.misses_regions(peer_local_) ? Moved::kNowhere : Moved::kGone;
  }
  into.take(at);
  return Moved::kDone;
}

}  // namespace shoal
