// What a link over paths has yet to send, and what it keeps until the peer has acknowledged it.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "transport/link.h"

namespace shoal {

// One frame on its way. A path that has it writes it from `n_written` on.
struct Outgoing {
  enum class At : uint8_t { kQueue, kPath, kSent, kAgain };

  Frame frame;
  std::vector<std::byte> owned;  // the payload, copied because it was small or asked back
  size_t n_written = 0;          // of header and payload together
  int path = -1;                 // that has it, or had it last
  At at = At::kQueue;
  uint64_t place = 0;   // how many frames that path had taken before it
  bool sealed = false;  // the payload's checksum is taken

  bool is_borrowed() const { return frame.payload != nullptr; }
  const std::byte* payload() const { return owned.empty() ? frame.bytes() : owned.data(); }
  size_t size() const { return sizeof(Header) + frame.header.length; }
};

// Three queues: control before small messages before bulk, of which older calls go first and,
// within a call, what is the furthest on. A frame gets its number when a path pulls it, and is kept
// until it is acknowledged; if its path is lost it is pulled once more. No I/O. Memory for sending
// again is bounded: at most kWindow frames are unacknowledged, whose large payloads are borrowed.
//
// Threads: one at a time, under the channel's lock.
class Outbox {
 public:
  // More would let a peer that does not acknowledge hold more memory; fewer would stop a fast link
  // for a round trip: 2048 small frames are 160 KiB, large ones 256 MiB.
  static constexpr uint32_t kWindow = 2048;

  struct Sizes {
    size_t copied = 1u << 10;  // payloads up to this size are copied, larger ones borrowed
    size_t small = 64u << 10;  // data up to this size overtakes larger data
    uint64_t n_before = 0;     // frames that count as sent and come; tests begin where numbers wrap
  };
  explicit Outbox(const Sizes& sizes)
      : sizes_(sizes), last_(sizes.n_before), acknowledged_(sizes.n_before) {}

  // True if the payload is free again already.
  bool send(const Frame& frame);

  // The next frame for a path, or nullptr. One path alone `carries_control`, which so keeps its
  // order. Bulk data is only for who `takes_bulk`. The frame stays here; it is the path's until
  // written() or lost().
  Outgoing* pull(int path, bool carries_control, bool takes_bulk = true);
  size_t next_bulk() const { return bulk_.empty() ? 0 : bulk_.front()->size(); }  // bytes
  bool has_queued() const;  // for some path, now or when there is room in the window
  bool owes_data() const;   // some was not acknowledged, or has yet to leave

  // Adds what waits for a path.
  void count_queued(size_t& n_frames, size_t& n_bytes) const;

  void written(Outgoing& out);  // the path is through with it

  // All frames up to `upto` have come. Adds the tokens of those whose payloads are free now to
  // `tokens`. False if no such frame was sent. Where memory runs out in the middle, each token is
  // added once, by this or the next.
  bool acknowledge(uint64_t upto, std::vector<uint64_t>& tokens);

  // A path is gone: what it had, and what left by it unacknowledged, is to be pulled again. Takes
  // no memory: nobody would say it once more.
  void lost(int path);

  // See Link::release. What was written already is not sent again: its number goes without it.
  void release(const CallId& call);

  // The tokens of payloads that are not what they were when they left.
  std::vector<uint64_t> spoiled() const;

  // Nothing that waits will be sent; what is said from here on goes whatever the window says.
  void drop_queued();
  void clear();

  uint64_t n_unacknowledged() const { return last_ - acknowledged_; }
  uint64_t last() const { return last_; }  // the number of the last frame that has one

 private:
  using Queue = std::deque<std::unique_ptr<Outgoing>>;

  void add_bulk(std::unique_ptr<Outgoing> out);
  Outgoing* pull_again(bool carries_control);
  Queue* next_queue(bool carries_control, bool takes_bulk);
  void ask_for_ack(Outgoing& out);

  const Sizes sizes_;
  Queue control_, small_;
  Queue bulk_;  // by precedence; but what ends something stays behind all that came before it
  size_t n_ending_ = 0;            // of them
  size_t small_run_ = 0;           // bytes of small messages that bulk data has waited for
  size_t n_unasked_ = 0;           // borrowed bytes since an acknowledgement was asked for
  Queue sent_;                     // numbered, not acknowledged; in order
  std::vector<Outgoing*> again_;   // of them, those to be sent once more; in order; has room
  Queue acknowledged_in_writing_;  // a path must still finish them: a stream has no gaps
  uint64_t last_, acknowledged_;   // whose lower halves the wire carries
  bool last_words_ = false;
};

}  // namespace shoal
