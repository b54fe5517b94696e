#include "transport/tcp_link.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "base/clock.h"

namespace shoal {
namespace {

// Bytes to read beyond the current frame, because small frames come many at a time. At most this
// much of a large payload that follows is copied once more.
constexpr size_t kReadAhead = 4u << 10;
// A larger payload is most likely followed by another: read only its header ahead.
constexpr size_t kReadAheadOfBulk = sizeof(Header);
constexpr int kMaxVectors = 32;
// The most frames that a path holds: as many as one write takes, and an acknowledgement.
constexpr size_t kMostWriting = kMaxVectors / 2 + 1;
// The bytes read or written in one turn, so that neither sending nor one link starves the others.
constexpr size_t kTurnBytes = 1u << 20;
// The most that a path pulls ahead, unless its pipe takes less. Pulled frames cannot be overtaken.
constexpr size_t kPulledBytes = 256u << 10;
// A path that owes a confirmation for this long is lost if another has answered meanwhile, so a
// dead path delays a call by no more. Kernels confirm a single packet within 40 ms. A shorter time
// would give up a path for one lost packet, which is harmless but costs a dial.
constexpr int64_t kSuspectNs = 80 * kMillisecond;
constexpr int64_t kAnswersNs = 40 * kMillisecond;

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

}  // namespace

TcpLink::TcpLink(int peer, size_t n_paths, FrameKeys keys, const Outbox::Sizes& sizes)
    : PathLink(peer, n_paths, std::move(keys), sizes), sizes_(sizes), paths_(n_paths) {}

bool TcpLink::add_path(size_t index, std::unique_ptr<Pipe>&& pipe, Bytes session) {
  if (!may_use_paths() || index >= paths_.size()) return false;
  std::vector<std::byte> ahead(kReadAhead);
  std::vector<Outgoing*> writing;
  writing.reserve(kMostWriting);
  std::unique_ptr<PathShare> share;
  if (paths_.size() > 1 && pipe->n_unconfirmed() >= 0)
    share = std::make_unique<PathShare>(loads(), index, *pipe);
  if (!is_lost(index)) forget_path(index, "was replaced by the peer");
  begin_path(index, session);
  Path& path = paths_[index];
  path.pipe = std::move(pipe);
  path.ahead = std::move(ahead);
  path.writing = std::move(writing);
  path.share = std::move(share);
  take_path(index);
  return true;
}

TcpLink::~TcpLink() { close(); }

Error TcpLink::connect(const Site& site, const PeerPlace& peer, std::unique_ptr<Link>& out) {
  if (site.paths == nullptr)
    return {Fault::kInternal, peer.rank, "there is no path maker for other hosts"};
  try {
    FrameKeys keys(site.job_key, site.epoch, site.rank, peer.rank, site.channel);
    auto link = std::make_unique<TcpLink>(peer.rank, peer.n_paths, std::move(keys));
    link->resume_by(*site.paths);
    out = std::move(link);
    return {};
  } catch (const std::runtime_error& error) {
    return {Fault::kInternal, -1, error.what()};
  }
}

void TcpLink::close_path(size_t index) {
  paths_[index] = {};
  has_lost_ = true;
}

void TcpLink::cut_path(size_t index) {
  Path& path = paths_[index];
  if (path.pipe == nullptr) return;
  path.pipe->end(true);
  path.is_stuck = path.is_cut = true;
  path.writing.clear();
  path.n_waiting = 0;
}

void TcpLink::close() {
  for (size_t path = 0; path < paths_.size(); ++path) close_path(path);
  PathLink::close();
}

std::vector<int> TcpLink::fds() const {
  std::vector<int> living;
  for (const Path& path : paths_)
    if (path.pipe != nullptr) living.push_back(path.pipe->fd());
  return living;
}

bool TcpLink::is_drained() const {
  return is_refused_ || std::all_of(paths_.begin(), paths_.end(), [](const Path& path) {
           return path.pipe == nullptr || path.is_drained;
         });
}

bool TcpLink::has_queued() const {
  bool can_write = false, has = PathLink::has_queued();
  for (const Path& path : paths_) {
    can_write |= path.pipe != nullptr && !path.is_stuck;
    has |= !path.writing.empty();
  }
  return (can_write || is_suspended()) && has;
}

bool TcpLink::on_event(FrameSink& sink, bool ended) {
  for (Path& path : paths_) path.is_ending |= ended;
  return pump(sink);
}

// Closing a socket with unread data resets it, and the peer loses what it has not read yet: perhaps
// the notice that names the dead rank.
bool TcpLink::lingers() {
  bool any = false;
  for (Path& path : paths_) {
    if (path.pipe == nullptr) continue;
    path.pipe->end(false);
    const iovec away = {path.ahead.data(), path.ahead.size()};
    ssize_t n;
    do n = path.pipe->read(&away, 1);
    while (n > 0 || (n < 0 && errno == EINTR));
    any |= n < 0 && would_block();
  }
  return any;
}

// ---- out

bool TcpLink::flush(FrameSink& sink) {
  bool moved = false;
  is_unflushed_ = false;
  do {  // again for frames of a path that was lost meanwhile
    has_lost_ = false;
    if (paths_.size() > 1) loads().look(flushed_ns_ = now_ns());
    std::array<size_t, Header::kMaxPaths> budgets;
    budgets.fill(kTurnBytes);
    bool more = true;
    while (std::exchange(more, false)) {
      for (size_t index = 0; index < paths_.size(); ++index)
        more |= flush_path(sink, index, budgets[index]);
      moved |= more;
      more &= paths_.size() > 1;  // another path may be the soonest now
    }
  } while (has_lost_ && !is_closed_);
  return acknowledge(sink) || moved;
}

// Send an acknowledgement by itself if no other frame carried it.
bool TcpLink::acknowledge(FrameSink& sink) {
  const size_t index = control_path();
  if (!is_ack_due() || is_closed_ || is_refused_ || is_lost(index)) return false;
  return acknowledge_by(sink, index);
}

bool TcpLink::acknowledge_by(FrameSink& sink, size_t index) {
  Path& path = paths_[index];
  if (path.acknowledgement.at == Outgoing::At::kPath) return false;  // the last one is still queued
  path.acknowledgement = acknowledgement(index);
  path.acknowledgement.at = Outgoing::At::kPath;
  path.writing.push_back(&path.acknowledgement);
  path.n_waiting += path.acknowledgement.size();
  size_t budget = kTurnBytes;
  return flush_path(sink, index, budget);
}

// True if no other path would bring the next bulk data sooner. A path that has no room now is
// written to when its descriptor is ready.
bool TcpLink::is_soonest(size_t index) {
  if (paths_.size() == 1) return true;
  const size_t n_bytes = outbox_.next_bulk();
  // As of flush(): with two moments each path could find the other sooner, and neither would send.
  const auto due = [&](size_t path) { return loads().due(path, n_bytes, flushed_ns_); };
  for (size_t other = 0; other < paths_.size(); ++other)
    if (other != index && paths_[other].pipe != nullptr && !paths_[other].is_stuck &&
        due(other) < due(index))
      return false;
  return true;
}

// Pull as much as one write may take. False if there is nothing to write.
bool TcpLink::fill(size_t index) {
  Path& path = paths_[index];
  const size_t most = std::min(kPulledBytes, path.pipe->appetite());
  while (path.n_waiting < most && 2 * (path.writing.size() + 1) <= kMaxVectors) {
    Outgoing* out = pull(index, is_soonest(index));
    if (out == nullptr) break;
    path.writing.push_back(out);
    const Frame& frame = out->frame;
    if (path.share != nullptr)
      path.share->took(out->size(), now_ns(), frame.is_bulk || frame.header.length > sizes_.small);
    path.n_waiting += out->size();
  }
  return !path.writing.empty();
}

bool TcpLink::flush_path(FrameSink& sink, size_t index, size_t& budget) {
  Path& path = paths_[index];
  bool moved = false;
  while (path.pipe != nullptr && !path.is_stuck && fill(index)) {
    if (budget == 0) {
      is_unflushed_ = true;
      break;
    }
    size_t n_wanted = 0;
    const ssize_t n = write_some(path, n_wanted);
    if (n < 0 && errno == EINTR) continue;
    if (n < static_cast<ssize_t>(n_wanted)) n_full_++;
    if (n < 0 && would_block()) break;
    if (n < 0) {
      // Reading may find the reason, such as a goodbye. pump() then notices the end.
      path.is_stuck = errno == EPIPE || errno == ECONNRESET;
      if (!path.is_stuck)
        lose_path(sink, index, std::string("could not be written to: ") + std::strerror(errno));
      break;
    }
    moved = true;
    count_written(path, static_cast<size_t>(n));
    budget -= std::min(budget, static_cast<size_t>(n));
    if (static_cast<size_t>(n) < n_wanted) break;
  }
  return moved;
}

LinkState TcpLink::state() const {
  LinkState state;
  outbox_.count_queued(state.n_queued, state.queued_bytes);
  state.n_full = n_full_;
  add_paths(state);
  for (const Path& path : paths_) {
    if (path.pipe == nullptr) continue;
    state.n_queued += path.writing.size();
    for (const Outgoing* out : path.writing) state.queued_bytes += out->size() - out->n_written;
    state.sockets.push_back(state_of_socket(path.pipe->fd()));
  }
  return state;
}

ssize_t TcpLink::write_some(Path& path, size_t& n_wanted) {
  iovec vectors[kMaxVectors];
  size_t n_vectors = 0;
  for (Outgoing* out : path.writing) {
    if (n_vectors + 2 > kMaxVectors) break;
    if (!out->sealed) seal(*out);  // its payload was released since it was pulled
    size_t skip = out->n_written;
    if (skip < sizeof(Header))
      vectors[n_vectors++] = {reinterpret_cast<std::byte*>(&out->frame.header) + skip,
                              sizeof(Header) - skip};
    skip = skip < sizeof(Header) ? 0 : skip - sizeof(Header);
    if (skip < out->frame.header.length)
      vectors[n_vectors++] = {const_cast<std::byte*>(out->payload()) + skip,
                              out->frame.header.length - skip};
    n_wanted += out->size() - out->n_written;
  }
  return path.pipe->write(vectors, n_vectors);
}

void TcpLink::count_written(Path& path, size_t n_bytes) {
  if (path.share != nullptr) path.share->wrote(n_bytes);
  while (n_bytes > 0) {
    Outgoing& out = *path.writing.front();
    const size_t step = std::min(n_bytes, out.size() - out.n_written);
    out.n_written += step;
    n_bytes -= step;
    if (out.n_written < out.size()) break;
    path.n_waiting -= std::min(path.n_waiting, out.size());
    path.writing.erase(path.writing.begin());
    if (&out == &path.acknowledgement)
      out.at = Outgoing::At::kSent;
    else
      written(out);
  }
  if (path.writing.empty()) path.n_waiting = 0;  // released frames have become smaller
}

// ---- in

bool TcpLink::pump(FrameSink& sink) {
  settle(sink);
  if (is_refused_ || is_closed_) return false;
  bool moved = flush(sink);
  for (size_t index = 0; index < paths_.size(); ++index) moved |= pump_path(sink, index);
  // The other paths, which may have room, have frames to send again, and no event will follow.
  if (has_lost_ && !is_closed_) moved |= flush(sink);
  return moved;
}

bool TcpLink::pump_path(FrameSink& sink, size_t index) {
  Path& path = paths_[index];
  if (path.is_cut) lose_path(sink, index, "was cut by this rank, which had no memory left");
  bool moved = false;
  path.is_drained = false;
  const auto is_open = [&] {
    return path.pipe != nullptr && !path.is_cut && !is_refused_ && !is_closed_;
  };
  // If memory ran out the last time, whole frames wait in `ahead`, which may be full.
  while (is_open() && parse(sink, index)) moved = true;
  for (size_t n_bytes = 0; n_bytes < kTurnBytes && !path.is_drained && is_open();) {
    const size_t n = read_some(sink, index);
    if (n == 0) break;
    moved = true;
    n_bytes += n;
    while (is_open() && parse(sink, index)) {
    }
  }
  return moved;
}

// Read the rest of the current payload straight into its buffer, and what follows into `ahead`. A
// short read means that the socket is empty (epoll(7)) or has ended. Returns the bytes read.
size_t TcpLink::read_some(FrameSink& sink, size_t index) {
  Path& path = paths_[index];
  Incoming& in = incoming_[index];
  if (path.ahead_begin > 0) {
    std::memmove(path.ahead.data(), path.ahead.data() + path.ahead_begin,
                 path.ahead_end - path.ahead_begin);
    path.ahead_end -= path.ahead_begin;
    path.ahead_begin = 0;
  }
  iovec vectors[2];
  size_t n_vectors = 0;
  const size_t rest = in.in_payload ? in.receive_buffer.size() - in.n_landed : 0;
  if (rest > 0) vectors[n_vectors++] = {in.receive_buffer.data() + in.n_landed, rest};
  const bool in_bulk = rest > 0 && in.header.length > kReadAhead;
  const size_t room = in_bulk ? kReadAheadOfBulk : path.ahead.size() - path.ahead_end;
  vectors[n_vectors++] = {path.ahead.data() + path.ahead_end, room};
  const ssize_t n = path.pipe->read(vectors, n_vectors);
  if (n < 0 && errno == EINTR) return 0;
  if (n < 0 && would_block()) {
    path.is_drained = true;
    return 0;
  }
  if (n <= 0) {
    lose_path(sink, index,
              n == 0 || errno == ECONNRESET
                  ? "closed the connection without a goodbye (its process died, or its host)"
                  : std::string("could not be read from: ") + std::strerror(errno));
    return 0;
  }
  const size_t landed = std::min(rest, static_cast<size_t>(n));
  in.n_landed += landed;
  path.is_drained = static_cast<size_t>(n) < rest + room && !path.is_ending;
  path.ahead_end += static_cast<size_t>(n) - landed;
  return static_cast<size_t>(n);
}

// Advance by one header or payload with the bytes read; false if more must be read first.
bool TcpLink::parse(FrameSink& sink, size_t index) {
  Path& path = paths_[index];
  Incoming& in = incoming_[index];
  if (!in.in_payload) {
    if (path.ahead_end - path.ahead_begin < sizeof(Header)) return false;
    std::memcpy(&in.header, path.ahead.data() + path.ahead_begin, sizeof(Header));
    // The header counts as read only once its payload has a buffer, since finding one may throw.
    if (!begin(sink, index)) return false;
    path.ahead_begin += sizeof(Header);
    return true;
  }
  const size_t here =
      std::min(in.receive_buffer.size() - in.n_landed, path.ahead_end - path.ahead_begin);
  if (here > 0) {
    std::memcpy(in.receive_buffer.data() + in.n_landed, path.ahead.data() + path.ahead_begin, here);
    in.n_landed += here;
    path.ahead_begin += here;
  }
  return in.n_landed == in.receive_buffer.size() && end(sink, index);
}

// ---- time

void TcpLink::look(FrameSink& sink, int64_t now) {
  PathLink::look(sink, now);
  if (is_closed_ || is_refused_) return;
  lose_silent_paths(sink);
  if (has_lost_) flush(sink);
}

void TcpLink::lose_silent_paths(FrameSink& sink) {
  for (size_t index = 0; index < paths_.size(); ++index) {
    if (paths_[index].pipe == nullptr) continue;
    const Pipe::Silence silence = paths_[index].pipe->silence();
    const bool is_suspect = silence.owed_ns >= std::max(kSuspectNs, 4 * silence.usual_ns);
    const bool is_cut = silence.owed_ns >= kSilentNs && can_resume();
    if (is_cut || (is_suspect && others_answer(sink, index, silence)))
      lose_path(sink, index,
                "confirmed nothing for " + std::to_string(silence.owed_ns / kMillisecond) + " ms");
    if (is_closed_) return;
  }
}

// Of the path that carries the heartbeats: an idle one owes nothing, and proves nothing.
int64_t TcpLink::owed_ns() {
  Pipe* pipe = paths_[control_path()].pipe.get();
  return pipe != nullptr ? pipe->silence().owed_ns : INT64_MAX;
}

// True if another path has brought a confirmation while this one owed one. Idle paths have nothing
// to confirm, so an empty frame is sent by them to provoke one. A path that cannot be written to is
// about to be lost, and could not take over.
bool TcpLink::others_answer(FrameSink& sink, size_t index, const Pipe::Silence& silence) {
  for (size_t other = 0; other < paths_.size(); ++other) {
    Path& path = paths_[other];
    if (other == index || path.pipe == nullptr || path.is_stuck) continue;
    const Pipe::Silence theirs = path.pipe->silence();
    if (theirs.since_confirmed_ns + kAnswersNs <= silence.owed_ns) return true;
    if (theirs.owed_ns == 0) acknowledge_by(sink, other);
  }
  return false;
}

}  // namespace shoal
