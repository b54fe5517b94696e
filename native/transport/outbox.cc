#include "transport/outbox.h"

#include <algorithm>
#include <utility>

#include "base/crc32c.h"

namespace shoal {
namespace {

// The small data that may overtake waiting bulk data: enough for many calls, without starving bulk.
constexpr size_t kSmallRun = 1u << 20;
// While there is more to send, an acknowledgement is requested once per this many bytes. Each costs
// the peer a frame and this end a wake-up; fewer hold memory for longer.
constexpr size_t kAskEvery = 512u << 10;

bool is_before(uint32_t one, uint32_t other) { return static_cast<int32_t>(one - other) < 0; }

// A frame that ends something must not overtake earlier ones, so it waits among bulk data.
bool is_ending(const Header& header) {
  return header.type == FrameType::kAbort || header.type == FrameType::kLost ||
         header.type == FrameType::kGoodbye;
}

bool is_control(const Header& header) {
  return header.type != FrameType::kData && !is_ending(header);
}

void copy(Outgoing& out) {
  if (!out.is_borrowed()) return;
  out.owned.assign(out.frame.payload, out.frame.payload + out.frame.header.length);
  out.frame.payload = nullptr;
  out.frame.token = 0;
}

// Empty a frame whose number must still be sent. Frames before it may rely on it to request the
// acknowledgement.
void hollow(Outgoing& out) {
  const Header before = out.frame.header;
  out.frame = Frame{};
  out.frame.header.sequence = before.sequence;
  out.frame.header.flags = before.flags & kAckSoon;
  out.owned.clear();
  out.sealed = false;
}

}  // namespace

bool Outbox::send(const Frame& frame) {
  const Header& header = frame.header;
  const bool small =
      header.type == FrameType::kData && header.length <= sizes_.small && !frame.is_bulk;
  auto out = std::make_unique<Outgoing>();
  out->frame = frame;
  const bool borrows = frame.payload != nullptr && header.length > sizes_.copied;
  if (frame.payload != nullptr && !borrows) copy(*out);
  if (is_control(header))
    control_.push_back(std::move(out));
  else if (small)
    small_.push_back(std::move(out));
  else
    add_bulk(std::move(out));
  return !borrows;
}

// Data that was just folded leaves before data that has yet to be read: it is still in the cache,
// and peers wait for it. Nothing overtakes an earlier frame that ends something.
void Outbox::add_bulk(std::unique_ptr<Outgoing> out) {
  auto from = bulk_.begin();
  if (is_ending(out->frame.header)) {
    from = bulk_.end();
    n_ending_++;
  } else if (n_ending_ > 0) {
    const auto last = std::find_if(bulk_.rbegin(), bulk_.rend(),
                                   [](const auto& one) { return is_ending(one->frame.header); });
    from = last.base();
  }
  const auto later = [](const Precedence& one, const auto& other) {
    return one < other->frame.precedence;
  };
  bulk_.insert(std::upper_bound(from, bulk_.end(), out->frame.precedence, later), std::move(out));
}

bool Outbox::has_queued() const {
  return !control_.empty() || !small_.empty() || !bulk_.empty() || !again_.empty();
}

bool Outbox::owes_data() const {
  const auto has_data = [](const Queue& queue) {
    return std::any_of(queue.begin(), queue.end(),
                       [](const auto& out) { return out->frame.header.type == FrameType::kData; });
  };
  return !small_.empty() || has_data(bulk_) || has_data(sent_);
}

void Outbox::count_queued(size_t& n_frames, size_t& n_bytes) const {
  for (const Queue* queue : {&control_, &small_, &bulk_}) {
    n_frames += queue->size();
    for (const auto& out : *queue) n_bytes += out->size();
  }
  n_frames += again_.size();
  for (const Outgoing* out : again_) n_bytes += out->size();
}

Outgoing* Outbox::pull_again(bool carries_control) {
  const auto next = std::find_if(again_.begin(), again_.end(), [&](const Outgoing* out) {
    return carries_control || !is_control(out->frame.header);
  });
  if (next == again_.end()) return nullptr;
  Outgoing* out = *next;
  again_.erase(next);
  return out;
}

Outbox::Queue* Outbox::next_queue(bool carries_control, bool takes_bulk) {
  if (carries_control && !control_.empty()) return &control_;
  if (!takes_bulk) return small_.empty() ? nullptr : &small_;
  const bool has_bulk = !bulk_.empty() && (!is_ending(bulk_.front()->frame.header) ||
                                           (control_.empty() && small_.empty()));
  if (!has_bulk) small_run_ = 0;
  if (!small_.empty() && small_run_ < kSmallRun) {
    small_run_ += small_.front()->size();
    return &small_;
  }
  small_run_ = 0;
  return has_bulk ? &bulk_ : nullptr;
}

// Request an acknowledgement with the last frame for now, and every kAskEvery bytes. A rank that
// leaves waits for all acknowledgements.
void Outbox::ask_for_ack(Outgoing& out) {
  if (out.is_borrowed() || out.frame.header.type == FrameType::kGoodbye) n_unasked_ += out.size();
  if (n_unasked_ == 0) return;
  if (n_unasked_ < kAskEvery && !(small_.empty() && bulk_.empty())) return;
  n_unasked_ = 0;
  out.frame.header.flags |= kAckSoon;
}

Outgoing* Outbox::pull(int path, bool carries_control, bool takes_bulk) {
  Outgoing* out = pull_again(carries_control);
  if (out == nullptr) {
    if (sent_.size() >= kWindow && !last_words_) return nullptr;
    Queue* queue = next_queue(carries_control, takes_bulk);
    if (queue == nullptr) return nullptr;
    if (again_.capacity() <= sent_.size()) again_.reserve(2 * sent_.size() + 1);
    sent_.push_back(std::move(queue->front()));
    queue->pop_front();
    out = sent_.back().get();
    if (is_ending(out->frame.header)) n_ending_--;
    out->frame.header.sequence = static_cast<uint32_t>(++last_);
    ask_for_ack(*out);
  }
  out->at = Outgoing::At::kPath;
  out->path = path;
  out->n_written = 0;
  return out;
}

void Outbox::written(Outgoing& out) {
  out.at = Outgoing::At::kSent;
  std::erase_if(acknowledged_in_writing_, [&](const auto& one) { return one.get() == &out; });
}

bool Outbox::acknowledge(uint64_t upto, std::vector<uint64_t>& tokens) {
  if (upto > last_) return false;
  if (upto > acknowledged_) tokens.reserve(tokens.size() + (upto - acknowledged_));
  for (; acknowledged_ < upto; ++acknowledged_) {
    Outgoing& out = *sent_.front();
    const uint64_t token = out.frame.token;
    if (out.at == Outgoing::At::kPath) {
      copy(out);
      acknowledged_in_writing_.push_back(std::move(sent_.front()));
    } else if (out.at == Outgoing::At::kAgain) {
      std::erase(again_, &out);
    }
    sent_.pop_front();
    if (token != 0) tokens.push_back(token);
  }
  return true;
}

void Outbox::lost(int path) {
  for (const auto& out : sent_) {
    if (out->path != path || out->at == Outgoing::At::kAgain) continue;
    out->at = Outgoing::At::kAgain;
    again_.push_back(out.get());
  }
  std::sort(again_.begin(), again_.end(), [](const Outgoing* one, const Outgoing* other) {
    return is_before(one->frame.header.sequence, other->frame.header.sequence);
  });
  std::erase_if(acknowledged_in_writing_, [&](const auto& out) { return out->path == path; });
}

void Outbox::release(const CallId& call) {
  for (Queue* queue : {&small_, &bulk_})
    std::erase_if(*queue, [&](const auto& out) { return out->frame.is_lent_by(call); });
  for (const auto& out : sent_) {
    if (!out->frame.is_lent_by(call)) continue;
    const bool half_written = out->at == Outgoing::At::kPath && out->n_written > 0;
    half_written ? copy(*out) : hollow(*out);
  }
  // The frame that was to request the acknowledgement may be gone.
  if (n_unasked_ == 0 || !small_.empty() || !bulk_.empty()) return;
  n_unasked_ = 0;
  Frame frame;
  frame.header.flags = kAckSoon;
  send(frame);
}

void Outbox::hollow_all(const CallId& call) {
  for (const auto& out : sent_)
    if (out->frame.is_lent_by(call)) hollow(*out);
  // release() may have dropped the frame that was to request the acknowledgement.
  if (!sent_.empty()) sent_.back()->frame.header.flags |= kAckSoon;
}

std::vector<uint64_t> Outbox::spoiled() const {
  std::vector<uint64_t> tokens;
  for (const auto& out : sent_)
    if (out->sealed && out->is_borrowed() && out->frame.token != 0 &&
        crc32c(0, out->payload(), out->frame.header.length) != out->frame.header.payload_crc)
      tokens.push_back(out->frame.token);
  return tokens;
}

void Outbox::drop_queued() {
  for (Queue* queue : {&control_, &small_, &bulk_}) queue->clear();
  n_ending_ = 0;
  last_words_ = true;
}

void Outbox::clear() {
  drop_queued();
  again_.clear();
  sent_.clear();
  acknowledged_in_writing_.clear();
}

}  // namespace shoal
