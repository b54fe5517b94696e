// The frames that a link over paths has yet to send, or keeps until the peer has acknowledged them.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "transport/link.h"

namespace shoal {

// One frame on its way. The path that holds it writes it, starting at `n_written`.
struct Outgoing {
  enum class At : uint8_t { kQueue, kPath, kSent, kAgain };

  Frame frame;
  std::vector<std::byte> owned;  // the payload, copied because it was small or asked back
  size_t n_written = 0;          // of header and payload together
  int path = -1;                 // the path that holds it, or held it last
  At at = At::kQueue;
  uint64_t place = 0;   // how many frames that path had taken before it
  bool sealed = false;  // the payload's checksum is taken

  bool is_borrowed() const { return frame.payload != nullptr; }
  const std::byte* payload() const { return owned.empty() ? frame.bytes() : owned.data(); }
  size_t size() const { return sizeof(Header) + frame.header.length; }
};

// Three queues: control frames, then small messages, then bulk data, by precedence. A frame gets
// its number when a path pulls it, and is kept until it is acknowledged; if its path is lost it is
// pulled again. No I/O. Memory for sending again is bounded: at most kWindow frames are
// unacknowledged, and their large payloads are borrowed.
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
    uint64_t n_before = 0;     // frames that count as sent and received; for tests of wrapping
  };
  explicit Outbox(const Sizes& sizes)
      : sizes_(sizes), last_(sizes.n_before), acknowledged_(sizes.n_before) {}

  // True if the payload is free again already.
  bool send(const Frame& frame);

  // The next frame for a path, or nullptr. Only one path `carries_control`, which keeps control
  // frames in order. Bulk data goes only to paths that `takes_bulk`. The frame stays in the outbox;
  // the path holds it until written() or lost().
  Outgoing* pull(int path, bool carries_control, bool takes_bulk = true);
  size_t next_bulk() const { return bulk_.empty() ? 0 : bulk_.front()->size(); }  // bytes
  bool has_queued() const;  // for some path, now or when there is room in the window
  bool owes_data() const;   // data has yet to leave or to be acknowledged

  // Add the number and bytes of frames that wait for a path.
  void count_queued(size_t& n_frames, size_t& n_bytes) const;

  void written(Outgoing& out);  // the path has written all of it

  // The peer has all frames up to `upto`. Appends the tokens of payloads that are free now to
  // `tokens`. False if no such frame was sent. If memory runs out halfway, each token is added
  // once, by this or the next call.
  bool acknowledge(uint64_t upto, std::vector<uint64_t>& tokens);

  // A path is gone: frames that it held, or that left by it unacknowledged, are pulled again.
  // Allocates nothing, because the loss is reported only once.
  void lost(int path);

  // See Link::release. A frame that was written already is not sent again; its number is sent
  // empty.
  void release(const CallId& call);
  // The rest of a release() that ran out of memory. No path may go on with a frame of the call that
  // it has begun.
  void hollow_all(const CallId& call);

  // The tokens of payloads that have changed since they left.
  std::vector<uint64_t> spoiled() const;

  // Drop waiting frames; frames queued from here on ignore the window.
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
  Queue bulk_;                     // by precedence; but frames that end something never overtake
  size_t n_ending_ = 0;            // such frames in `bulk_`
  size_t small_run_ = 0;           // bytes of small messages that bulk data has waited for
  size_t n_unasked_ = 0;           // borrowed bytes since an acknowledgement was asked for
  Queue sent_;                     // numbered, not acknowledged; in order
  std::vector<Outgoing*> again_;   // those of `sent_` to send again; in order; capacity is reserved
  Queue acknowledged_in_writing_;  // a path must still finish them: a stream has no gaps
  uint64_t last_, acknowledged_;   // whose lower halves the wire carries
  bool last_words_ = false;
};

}  // namespace shoal
