// A link over one or more paths: the part that is independent of the kind of path.
//
// Frames are numbered and acknowledged. A payload is released when the peer has acknowledged it. If
// a path is lost while another lives, its frames are sent again. Control frames keep their order;
// data is delivered in any order, each frame once. Frames that end something (abort, lost, goodbye)
// are delivered after everything that was sent before them.
//
// A link starts without a path: unlinked. The first frame, or dial(), asks its PathSource for
// paths, which arrive by add_path(). A link that loses its last path does not break but is
// suspended: frames wait, no payload is released, and add_path() resumes it.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "transport/header_seal.h"
#include "transport/inbox.h"
#include "transport/link.h"
#include "transport/outbox.h"
#include "transport/path_loads.h"
#include "transport/pipe.h"

namespace shoal {

class PathLink;

// Makes and remakes paths, and passes them to PathLink::add_path().
//
// Threads: under the channel's lock.
class PathSource {
 public:
  virtual ~PathSource() = default;
  // How long a link waits for a path after it has lost all; 0: not at all.
  virtual int64_t resume_ns() const = 0;
  virtual void attached(int peer, PathLink& link) = 0;
  virtual void want(int peer, size_t path) = 0;
  // Why the last attempt to make a path to the peer failed; empty if unknown.
  virtual std::string last_failure(int) const { return {}; }
  // The link needs no more paths: the peer left or was given up, or the link was closed.
  virtual void ended(int peer) = 0;

  PathLoads loads;  // of all its links
};

// Threads: under the channel's lock.
class PathLink : public Link {
 public:
  // How long the first path may take if resume_ns() is 0.
  static constexpr int64_t kFirstPathNs = 10'000'000'000;
  // A path that owes a confirmation for this long is lost. This is well before silence would
  // condemn a peer that is only cut off.
  static constexpr int64_t kSilentNs = 2 * kSecond;

  bool send(const Frame& frame) override;
  bool has_queued() const override { return !is_closed_ && outbox_.has_queued(); }
  bool release(uint64_t token, const CallId& call) override;
  void close() override;
  void look(FrameSink& sink, int64_t now) override;
  // A closed link whose end could not be reported, for want of memory, counts as silent.
  int64_t listens_since() const override {
    return has_path() || is_closed_ ? listens_since_ : now_;
  }
  bool is_unlinked() const override { return can_resume() && !is_begun(); }
  void dial() override;
  bool is_suspended() const override { return can_resume() && is_begun() && !has_path(); }
  bool owes_data() const override { return is_begun() && may_use_paths() && outbox_.owes_data(); }

  // Let `source` make paths from here on. The link then breaks only in look(), after it has been
  // without a path for source.resume_ns(). `source` must outlive the link.
  void resume_by(PathSource& source);
  // Add a path, possibly in place of one that this end takes for alive, whose unacknowledged frames
  // are sent again. False if the link needs no path. `session`: the secret of this connection,
  // which seals its headers. If memory runs out the caller keeps the pipe and may try again.
  virtual bool add_path(size_t path, std::unique_ptr<Pipe>&& pipe, Bytes session) = 0;
  // The peer reports that it lacks the path, which this end may not know. Ignored for a path made
  // in the last second, because the report may be older.
  void doubt(FrameSink& sink, size_t path);
  // The peer's process is known to be gone. Unless a path lives, the link breaks at the next
  // pump().
  void give_up(const std::string& why);

 protected:
  // A frame that a path is receiving.
  struct Incoming {
    Header header;
    std::span<std::byte> receive_buffer;
    size_t n_landed = 0;
    bool in_payload = false;
    bool is_again = false;            // it has arrived before and is dropped
    std::vector<std::byte> diverted;  // receives it instead of the sink's buffer
  };

  PathLink(int peer, size_t n_paths, FrameKeys keys, const Outbox::Sizes& sizes);

  // The path is a new connection from here on: its first frame each way has place 0.
  void begin_path(size_t path, Bytes session);

  // Sending. The next frame for a path, sealed; nullptr if there is none. Without `takes_bulk`, no
  // bulk data: another path brings it sooner.
  Outgoing* pull(size_t path, bool takes_bulk);
  void written(Outgoing& out) { outbox_.written(out); }
  // A frame that only acknowledges, owned by the path. Call it if is_ack_due().
  Outgoing acknowledgement(size_t path);
  bool is_ack_due() const { return ack_due_; }
  void seal(Outgoing& out);

  // Receiving. begin(): a path's header has arrived; find a buffer for its payload. end(): the
  // payload has arrived. False if nothing more may be read, because the link is broken or closed.
  bool begin(FrameSink& sink, size_t path);
  bool end(FrameSink& sink, size_t path);

  // A path is gone; with the last one the link is suspended or broken. Partly received frames are
  // dropped.
  void lose_path(FrameSink& sink, size_t path, const std::string& why);
  void forget_path(size_t path, const std::string& why);  // the same, without a callback
  // The second half of add_path(): use the path.
  void take_path(size_t path);
  // Break a link that was given up meanwhile.
  void settle(FrameSink& sink);
  // Stop reading from the peer, which can still be sent the reason.
  void refuse(FrameSink& sink, const std::string& what);
  // Close a path, which holds no frames afterwards.
  virtual void close_path(size_t path) = 0;
  virtual void cut_path(size_t path) = 0;

  // The path of control frames. It changes only when lost, because frames on another path could
  // overtake.
  size_t control_path() const { return control_path_; }
  bool is_lost(size_t path) const { return is_lost_[path]; }
  bool has_path() const;
  bool may_use_paths() const { return !is_closed_ && !is_refused_ && !has_left_; }
  bool can_resume() const { return source_ != nullptr && may_use_paths(); }
  void add_paths(LinkState& state) const;

  PathLoads& loads() { return source_ != nullptr ? source_->loads : own_loads_; }

  const int peer_;
  const FrameKeys keys_;
  Outbox outbox_;
  std::vector<Incoming> incoming_;  // by path
  bool is_closed_ = false;
  bool is_refused_ = false;

 private:
  bool take_acknowledged(FrameSink& sink, uint64_t upto);
  void take(size_t path);
  bool deliver(FrameSink& sink, const Header& header, std::span<std::byte> payload);
  bool deliver_endings(FrameSink& sink);
  static void divert(Incoming& in);
  bool is_begun() const { return is_dialled_ || was_linked_; }
  int64_t patience_ns() const;
  std::string why_without() const;
  void break_off(FrameSink& sink, const std::string& why, bool is_unmet = false);

  struct Seals {
    HeaderSeal out, in;
    uint64_t n_out = 0, n_in = 0;  // frames sent and received
  };
  std::vector<std::optional<Seals>> seals_;  // by path; set for paths that were made
  Inbox inbox_;
  std::vector<bool> is_lost_;
  struct History {
    std::string why;      // of its last loss
    int64_t lost_ns = 0;  // since when it is lost or dialled; 0: not known yet
    int64_t made_ns = 0;  // when it was made last; 0: not known yet
    uint32_t n_made = 0;
  };
  std::vector<History> histories_;
  size_t control_path_ = 0;  // meaningless while no path lives
  PathSource* source_ = nullptr;
  PathLoads own_loads_;          // used if there is no PathSource
  bool is_dialled_ = false;      // its paths were asked for
  bool was_linked_ = false;      // it has, or had, some path
  int64_t now_ = 0;              // at the last look()
  int64_t suspended_ns_ = 0;     // for how long, while this process ran
  int64_t listens_since_ = 0;    // when it resumed last
  bool has_left_ = false;        // the peer sent a goodbye
  std::string eviction_;         // the reason; empty: not evicted
  std::vector<uint64_t> freed_;  // tokens; the sink was notified of the first `n_sent_`
  size_t n_sent_ = 0;
  bool ack_due_ = false;
  uint32_t n_unacknowledged_ = 0;  // received since the last acknowledgement
  struct Ending {
    Header header;
    std::vector<std::byte> payload;
  };
  std::map<uint32_t, Ending> endings_;  // by distance above the floor's start; few
};

}  // namespace shoal
