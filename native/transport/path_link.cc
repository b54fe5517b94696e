#include "transport/path_link.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/crc32c.h"

namespace shoal {
namespace {

// Frames without kAckSoon are acknowledged by whatever frame goes back, and at the latest after
// this many: a small part of the window.
constexpr uint32_t kMostUnacknowledged = Outbox::kWindow / 8;

uint64_t sequence_of(const Header& header, uint64_t near) {
  return header.type == FrameType::kAck ? 0 : widen(header.sequence, near);
}

bool is_ending(FrameType type) {
  return type == FrameType::kAbort || type == FrameType::kLost || type == FrameType::kGoodbye;
}

bool is_same_segment(const Header& one, const Header& other) {
  return one.type == other.type && call_of(one) == call_of(other) && one.flow == other.flow &&
         one.segment == other.segment;
}

std::string seconds(int64_t ns) {
  const int64_t tenths = ns / (100 * kMillisecond);
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

}  // namespace

PathLink::PathLink(int peer, size_t n_paths, FrameKeys keys, const Outbox::Sizes& sizes)
    : peer_(peer),
      keys_(std::move(keys)),
      outbox_(sizes),
      incoming_(n_paths),
      seals_(n_paths),
      inbox_(sizes.n_before),
      is_lost_(n_paths, true),
      histories_(n_paths) {}

void PathLink::begin_path(size_t path, Bytes session) {
  const auto number = static_cast<uint32_t>(path);
  seals_[path] = Seals{keys_.out(number, session), keys_.in(number, session)};
}

void PathLink::close() {
  if (source_ != nullptr && !is_closed_) source_->ended(peer_);
  is_closed_ = true;
  outbox_.clear();
  endings_.clear();
}

// ---- out

bool PathLink::send(const Frame& frame) {
  if (is_closed_) return true;
  // A heartbeat is worthless later.
  if (frame.header.type == FrameType::kHeartbeat && can_resume() && !has_path()) return true;
  // A goodbye waits for a peer that may still connect; it is no reason to dial.
  if (frame.header.type != FrameType::kGoodbye) dial();
  return outbox_.send(frame);
}

Outgoing* PathLink::pull(size_t path, bool takes_bulk) {
  Outgoing* out = outbox_.pull(static_cast<int>(path), path == control_path(), takes_bulk);
  if (out == nullptr) return nullptr;
  out->place = seals_[path]->n_out++;
  seal(*out);
  return out;
}

// The checksum is taken just before the bytes leave, so that the copy to the kernel finds them
// cached.
void PathLink::seal(Outgoing& out) {
  Header& header = out.frame.header;
  if (!out.sealed)
    header.payload_crc = header.length == 0 ? 0 : crc32c(0, out.payload(), header.length);
  out.sealed = true;
  header.acknowledged = static_cast<uint32_t>(inbox_.floor());
  ack_due_ = false;
  n_unacknowledged_ = 0;
  const HeaderSeal& with = seals_[static_cast<size_t>(out.path)]->out;
  header.seal = with.of(header, {out.place, sequence_of(header, outbox_.last()), inbox_.floor()});
}

Outgoing PathLink::acknowledgement(size_t path) {
  Outgoing out;
  out.frame.header.type = FrameType::kAck;
  out.path = static_cast<int>(path);
  out.place = seals_[path]->n_out++;
  seal(out);
  return out;
}

// ---- in

// A callback of the sink may end this link, or run out of memory; then the header is read again.
bool PathLink::take_acknowledged(FrameSink& sink, uint64_t upto) {
  if (!outbox_.acknowledge(upto, freed_)) {
    refuse(sink, "acknowledged frames that it was not sent");
    return false;
  }
  for (; n_sent_ < freed_.size() && !is_closed_; ++n_sent_) sink.sent(peer_, freed_[n_sent_]);
  freed_.clear();
  n_sent_ = 0;
  return !is_closed_;
}

bool PathLink::begin(FrameSink& sink, size_t path) {
  Incoming& in = incoming_[path];
  Header& header = in.header;
  const std::string n_bytes = std::to_string(header.length) + " B";
  Seals& seals = *seals_[path];
  const uint64_t acknowledged = widen(header.acknowledged, outbox_.last());
  if (!seals.in.fits(header, {seals.n_in, sequence_of(header, inbox_.floor()), acknowledged})) {
    refuse(sink, "sent a corrupt header as frame " + std::to_string(seals.n_in) + " of path " +
                     std::to_string(path) +
                     ": its seal does not fit, so it was damaged, repeated, moved or forged in "
                     "transit, or is of another version, epoch or key");
    return false;
  }
  if (header.length > Header::kMaxPayload) {
    refuse(sink, "announced a payload of " + n_bytes + "; at most " +
                     std::to_string(Header::kMaxPayload) + " are allowed");
    return false;
  }
  if (!take_acknowledged(sink, acknowledged) || is_lost_[path]) return false;
  const bool counts = header.type != FrameType::kAck;
  const auto verdict = counts ? inbox_.judge(header.sequence) : Inbox::Verdict::kNew;
  if (verdict == Inbox::Verdict::kBeyond || (!counts && header.length > 0)) {
    refuse(sink, "sent frame " + std::to_string(header.sequence) + " of type " +
                     std::to_string(static_cast<int>(header.type)) +
                     ", which is far ahead of those before it");
    return false;
  }
  in.is_again = verdict == Inbox::Verdict::kAgain;
  header.set_path(static_cast<uint32_t>(path));
  in.receive_buffer = {};
  if (in.is_again) {
    in.diverted.resize(header.length);
    in.receive_buffer = in.diverted;
  } else if (header.length > 0) {
    in.receive_buffer = sink.receive_buffer(peer_, header);
  }
  if (in.receive_buffer.size() != header.length) {
    refuse(sink, "sent a frame of " + n_bytes + " that was not expected");
    return false;
  }
  in.n_landed = 0;
  in.in_payload = true;
  seals.n_in++;  // last, because after a failed allocation the header is read again
  return true;
}

bool PathLink::end(FrameSink& sink, size_t path) {
  Incoming& in = incoming_[path];
  in.in_payload = false;
  Header header = in.header;
  const std::span<std::byte> payload = in.receive_buffer;
  const std::vector<std::byte> keep = std::exchange(in.diverted, {});
  if (!payload.empty() && crc32c(0, payload.data(), payload.size()) != header.payload_crc) {
    refuse(sink,
           "sent a corrupt payload (" + std::to_string(header.length) +
               " B, checksum does not match): the network damaged it, or its program wrote to "
               "the memory of a call in flight");
    return false;
  }
  if (header.type == FrameType::kAck) return true;
  if (in.is_again) {
    ack_due_ = true;  // the sender has not seen our acknowledgement
    return true;
  }
  take(path);
  header.flags &= static_cast<uint16_t>(~kAckSoon);
  return deliver(sink, header, payload) && deliver_endings(sink);
}

// A complete frame of this path. Another path may be bringing the same frame again or, from a
// malicious peer, the same segment: it must not write to memory that will soon have another owner.
void PathLink::take(size_t path) {
  const Header& header = incoming_[path].header;
  const uint64_t floor = inbox_.floor();
  inbox_.take(header.sequence);
  const bool fills_a_gap = inbox_.floor() - floor > 1;
  n_unacknowledged_++;
  ack_due_ |=
      (header.flags & kAckSoon) != 0 || fills_a_gap || n_unacknowledged_ >= kMostUnacknowledged;
  for (Incoming& other : incoming_) {
    if (!other.in_payload || other.is_again) continue;
    const bool is_same = other.header.sequence == header.sequence;
    if (is_same || is_same_segment(other.header, header)) divert(other);
    other.is_again = is_same;
  }
}

void PathLink::divert(Incoming& in) {
  if (in.receive_buffer.data() == in.diverted.data()) return;
  in.diverted.assign(in.receive_buffer.begin(), in.receive_buffer.end());
  in.receive_buffer = in.diverted;
}

bool PathLink::deliver(FrameSink& sink, const Header& header, std::span<std::byte> payload) {
  // A frame that ends something is acknowledged, but waits while an earlier frame is missing.
  if (is_ending(header.type) && widen(header.sequence, inbox_.floor()) > inbox_.floor()) {
    endings_[header.sequence] = {header, {payload.begin(), payload.end()}};
    return true;
  }
  // The peer has given this rank up, perhaps for a payload with a wrong checksum. Only this end can
  // see if its own program changed the payload.
  if (header.type == FrameType::kLost)
    for (const uint64_t token : outbox_.spoiled()) sink.spoiled(peer_, token);
  if (header.type == FrameType::kGoodbye) {
    has_left_ = true;
    if (source_ != nullptr) source_->ended(peer_);
  }
  sink.arrived(peer_, header, payload);
  return !is_closed_ && !is_refused_;
}

bool PathLink::deliver_endings(FrameSink& sink) {
  for (auto next = endings_.begin(); next != endings_.end();) {
    if (widen(next->first, inbox_.floor()) > inbox_.floor()) {
      ++next;
      continue;
    }
    Ending ending = std::move(next->second);
    endings_.erase(next);
    if (!deliver(sink, ending.header, ending.payload)) return false;
    next = endings_.begin();
  }
  return true;
}

// ---- paths that go and come

void PathLink::resume_by(PathSource& source) {
  source_ = &source;
  source.attached(peer_, *this);
}

// Marked only after all paths are requested: a request that ran out of memory is made again.
void PathLink::dial() {
  if (is_dialled_ || !can_resume()) return;
  for (size_t path = 0; path < is_lost_.size(); ++path)
    if (is_lost_[path]) source_->want(peer_, path);
  is_dialled_ = true;
}

bool PathLink::has_path() const {
  return std::find(is_lost_.begin(), is_lost_.end(), false) != is_lost_.end();
}

void PathLink::forget_path(size_t path, const std::string& why) {
  is_lost_[path] = true;
  try {
    histories_[path].why = why;
  } catch (const std::bad_alloc&) {  // no later call would forget the path
    histories_[path].why.clear();
  }
  histories_[path].lost_ns = 0;
  incoming_[path] = {};
  close_path(path);
  outbox_.lost(static_cast<int>(path));
  // Frames lost with this path may have carried acknowledgements for another, so send one.
  ack_due_ = true;
  if (path != control_path_ || !has_path()) return;
  const auto living = std::find(is_lost_.begin(), is_lost_.end(), false);
  control_path_ = static_cast<size_t>(living - is_lost_.begin());
}

void PathLink::lose_path(FrameSink& sink, size_t path, const std::string& why) {
  if (is_closed_ || is_lost_[path]) return;
  if (can_resume())
    source_->want(peer_, path);  // first: if memory runs out the loss is found again
  forget_path(path, why);
  const bool is_over = !has_path() && (!can_resume() || source_->resume_ns() == 0);
  if (is_over) break_off(sink, why);
}

void PathLink::take_path(size_t path) {
  if (!has_path()) {
    control_path_ = path;
    listens_since_ = now_;  // look() may not be called while there is no path
  }
  is_lost_[path] = false;
  histories_[path].n_made++;
  histories_[path].made_ns = 0;
  eviction_.clear();
  ack_due_ |= was_linked_;  // so that the peer need not send again what has arrived
  was_linked_ = true;
}

void PathLink::doubt(FrameSink& sink, size_t path) {
  if (path >= is_lost_.size()) return;
  dial();
  const int64_t made_ns = histories_[path].made_ns;
  if (is_lost_[path] || made_ns == 0 || now_ - made_ns < kSecond) return;
  lose_path(sink, path, "was lost by the peer");
}

void PathLink::give_up(const std::string& why) {
  if (is_suspended()) eviction_ = why;
}

void PathLink::settle(FrameSink& sink) {
  if (eviction_.empty() || !is_suspended()) return;
  break_off(sink, why_without() + eviction_, !was_linked_);
}

int64_t PathLink::patience_ns() const {
  const int64_t resume_ns = source_->resume_ns();
  return resume_ns > 0 || was_linked_ ? resume_ns : kFirstPathNs;
}

// The beginning of an error that explains why there is no path to the peer.
std::string PathLink::why_without() const {
  return was_linked_ ? histories_[control_path_].why + "; " : "could not be connected to: ";
}

// Time in which this process did not run hardly counts: no path could be made then.
void PathLink::look(FrameSink& sink, int64_t now) {
  constexpr int64_t kMostNs = 500 * kMillisecond;
  const int64_t passed = now_ == 0 ? 0 : std::min(now - now_, kMostNs);
  now_ = now;
  if (is_closed_) return;
  for (size_t path = 0; path < histories_.size() && is_begun(); ++path) {
    History& history = histories_[path];
    int64_t& since_ns = is_lost_[path] ? history.lost_ns : history.made_ns;
    if (since_ns == 0) since_ns = now;
  }
  if (!is_suspended()) {
    if (suspended_ns_ > 0) listens_since_ = now;
    suspended_ns_ = 0;
    return;
  }
  suspended_ns_ += passed;
  settle(sink);
  if (is_closed_ || suspended_ns_ < patience_ns()) return;
  const std::string last = source_->last_failure(peer_);
  break_off(sink,
            why_without() +
                (was_linked_ ? "no connection could be made again for " : "nothing answered for ") +
                seconds(suspended_ns_) + " (SHOAL_RESUME_S)" + (last.empty() ? "" : ": " + last));
}

void PathLink::add_paths(LinkState& state) const {
  for (size_t path = 0; path < histories_.size(); ++path) {
    const History& history = histories_[path];
    using Is = PathState::Is;
    Is is = is_lost_[path] ? Is::kLost : Is::kOpen;
    if (is_lost_[path] && history.n_made == 0) is = is_begun() ? Is::kDialled : Is::kUnmade;
    if (is_lost_[path] && source_ != nullptr && !can_resume()) is = Is::kEnded;
    state.paths.push_back(
        {is, history.lost_ns, std::max(history.n_made, uint32_t{1}) - 1, history.why});
  }
}

void PathLink::break_off(FrameSink& sink, const std::string& why, bool is_unmet) {
  const Error error = {Fault::kPeerLost, peer_, why, {}, true, is_unmet};  // first: it may throw
  close();
  listens_since_ = now_;  // see listens_since()
  if (!is_refused_) sink.broken(peer_, error);
}

void PathLink::refuse(FrameSink& sink, const std::string& what) {
  const Error error = {Fault::kPeerLost, peer_, what};  // first: it may throw
  is_refused_ = true;
  if (source_ != nullptr) source_->ended(peer_);
  for (Incoming& in : incoming_) in.in_payload = false;
  outbox_.drop_queued();
  sink.broken(peer_, error);
}

// Bytes written to a path are the kernel's copy, so there is nothing to wait for.
bool PathLink::release(uint64_t, const CallId& call) {
  try {
    outbox_.release(call);
    for (Incoming& in : incoming_)
      if (in.in_payload && call_of(in.header) == call) divert(in);
  } catch (const std::bad_alloc&) {
    // Without memory to copy half-sent or half-received frames the paths are useless: cut them.
    // New ones carry the frames of other calls.
    for (size_t path = 0; path < is_lost_.size(); ++path) {
      incoming_[path].in_payload = false;
      cut_path(path);
    }
    outbox_.hollow_all(call);
  }
  return true;
}

}  // namespace shoal
