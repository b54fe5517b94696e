// A link over one or more paths: what does not depend on what a path is.
//
// Frames are numbered and acknowledged. One payload is free when the peer has acknowledged it; a
// path that is lost while another lives costs that its frames go once more. Control frames keep
// their order; data is delivered in any order, each frame once. What ends something (abort, lost,
// goodbye) is delivered after everything that was sent before it.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "transport/header_seal.h"
#include "transport/inbox.h"
#include "transport/link.h"
#include "transport/outbox.h"

namespace shoal {

// Threads: under the mesh's lock.
class PathLink : public Link {
 public:
  bool send(const Frame& frame) override { return is_closed_ || outbox_.send(frame); }
  bool has_queued() const override { return !is_closed_ && outbox_.has_queued(); }
  void disown(const std::byte* from, size_t n_bytes) override;
  void close() override;

 protected:
  // A frame that a path brings.
  struct Incoming {
    Header header;
    std::span<std::byte> landing;
    size_t n_landed = 0;
    bool in_payload = false;
    bool is_again = false;            // it has come before: nobody gets it
    std::vector<std::byte> diverted;  // where it lands, if not where the sink said
  };

  PathLink(int peer, size_t n_paths, FrameKeys keys, const Outbox::Sizes& sizes);

  // The path is a new connection from here on: its first frame each way has place 0.
  void begin_path(size_t path, Bytes session);

  // Out. The next frame for a path, sealed; nullptr if there is none.
  Outgoing* pull(size_t path);
  void written(Outgoing& out) { outbox_.written(out); }
  // A frame that tells nothing but what has come; it is the path's. Call it with is_ack_due().
  Outgoing acknowledgement(size_t path);
  bool is_ack_due() const { return ack_due_; }
  void seal(Outgoing& out);

  // In. begin(): the path's header is here; finds a place for its payload. end(): the payload is.
  // False when nothing more may be read, because the link is broken or was closed.
  bool begin(FrameSink& sink, size_t path);
  bool end(FrameSink& sink, size_t path);

  // The path is gone; with the last one the link is broken. What it brought in part is forgotten.
  void lose_path(FrameSink& sink, size_t path, const std::string& why);
  // The peer is not read any further, but can still be told why.
  void refuse(FrameSink& sink, const std::string& what);
  // The path has no frames any more afterwards. Cut: its end is found at the next pump().
  virtual void close_path(size_t path) = 0;
  virtual void cut_path(size_t path) = 0;

  size_t control_path() const;
  bool is_lost(size_t path) const { return is_lost_[path]; }

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

  struct Seals {
    HeaderSeal out, in;
    uint64_t n_out = 0, n_in = 0;  // frames that went, and that came
  };
  std::vector<Seals> seals_;  // by path
  Inbox inbox_;
  std::vector<bool> is_lost_;
  bool ack_due_ = false;
  uint32_t n_unsaid_ = 0;  // frames that came since the peer was last told
  struct Ending {
    Header header;
    std::vector<std::byte> payload;
  };
  std::map<uint32_t, Ending> endings_;  // by how far they are above the floor's start; few
};

}  // namespace shoal
