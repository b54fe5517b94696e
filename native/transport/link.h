// A link carries frames to and from one peer. It knows no collectives, dtypes or chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "base/error.h"
#include "transport/frame.h"
#include "transport/link_state.h"

namespace shoal {

// Memory of the peer that this process can access: in a region that it shares, or in a slot.
struct Remote {
  uint32_t place = 0;   // the region, or the slot
  uint64_t offset = 0;  // in the region; in a slot: the stamp that it had when it was offered
  bool in_slot = false;
};

// The target of a get: the bytes are stored at `at`, or folded into it. A link that can read the
// peer's memory folds straight from there; another stores the bytes elsewhere first.
struct Into {
  std::byte* at = nullptr;
  size_t n_bytes = 0;
  void (*fold)(std::byte* out, const std::byte* a, const std::byte* b, size_t n_elems) = nullptr;
  size_t n_elems = 0;

  void take(const std::byte* from) const {
    if (fold != nullptr)
      fold(at, at, from, n_elems);
    else
      std::memcpy(at, from, n_bytes);
  }
};

// The outcome of a put or a get.
enum class Moved : uint8_t {
  kDone,
  kLater,    // from put() and get() only: FrameSink::moved() follows, after they have returned
  kNowhere,  // from put() and get() only: the peer has no such memory; nothing was touched
  kGone,     // from get() only: the peer has released the memory, because its call has failed
  kStale,    // of a get: the slot has been reused, so the bytes read are worthless
};

// The receiver of a link's frames: the engine, or a test.
//
// Buffers: `receive_buffer` names the memory for the payload that `header` announces, header.length
// bytes that stay valid until `arrived` or `broken`; an empty span refuses the frame and breaks the
// link. A link whose payload already lies in readable memory skips `receive_buffer`; that span then
// dies with the call.
class FrameSink {
 public:
  virtual ~FrameSink() = default;
  virtual std::span<std::byte> receive_buffer(int peer, const Header& header) = 0;
  virtual void arrived(int peer, const Header& header, std::span<std::byte> payload) = 0;
  virtual void sent(int peer, uint64_t token) = 0;
  // Called instead of sent() if this process wrote to the payload after its checksum was taken. The
  // peer will find it corrupt.
  virtual void spoiled(int peer, uint64_t token) = 0;
  // A put or get that was kLater is now kDone or kStale.
  virtual void moved(int peer, uint64_t token, Moved how) = 0;
  // See Link::release().
  virtual void released(int peer, uint64_t token) = 0;
  // The link is broken; called at most once, and last. Until close(), flush() still sends what it
  // can. The link touches no memory whose release was asked for, and does not call released() any
  // more.
  virtual void broken(int peer, const Error& error) = 0;
};

// Threads: under the channel's lock.
// Buffers: a frame's payload is borrowed from send() until send() returns true, sent(token) runs,
// or the link is closed or broken. Over paths that is when the peer has acknowledged it. The memory
// of a put or get is borrowed until that has completed. release() ends all of it.
class Link {
 public:
  virtual ~Link() = default;

  // Queue a frame, without blocking. True if the payload is free again already; then sent() is not
  // called. If memory runs out the link has not taken the frame.
  virtual bool send(const Frame& frame) = 0;

  // Pass queued frames to the medium, and wake the peer if it sleeps. True if anything moved.
  virtual bool flush(FrameSink& sink) = 0;

  // flush(), and deliver the frames that have arrived. True if anything moved.
  virtual bool pump(FrameSink& sink) = 0;

  // True if frames wait for room in the kernel or the ring.
  virtual bool has_queued() const = 0;

  // True if flush() stopped because it had moved enough for one turn; no event will follow.
  virtual bool is_unflushed() const { return false; }

  // True if there is no connection to the peer because none has been needed yet. No attempt is
  // under way, and no deadline runs.
  virtual bool is_unlinked() const { return false; }
  // Connect, as send() does for any frame but a heartbeat or a goodbye. Does nothing if there is a
  // connection or one is being made.
  virtual void dial() {}
  // True if there is no connection now and one is being made, so that silence means nothing.
  virtual bool is_suspended() const { return false; }
  // True if the peer may lack data of calls that have succeeded here.
  virtual bool owes_data() const { return has_queued(); }
  // Since when frames of the peer could arrive, as of the last look(); 0: always.
  virtual int64_t listens_since() const { return 0; }

  // For how long the peer's host has not confirmed what was sent to it; 0: it has, or it is this
  // host. INT64_MAX: there is no connection. Says nothing of the peer's process.
  virtual int64_t owed_ns() { return 0; }

  // For people to read; costs a few microseconds.
  virtual LinkState state() const { return {}; }

  // Release the memory of a call: drop the payloads that it has lent (or copy that of a half-sent
  // frame), divert its arriving frames, and give up its puts and gets, for which moved() is not
  // called. Other calls are not affected, even if they use the same memory. True: from now on this
  // link neither reads nor writes that call's memory. False: that holds once released(token) has
  // run, or the link is broken or closed.
  virtual bool release(uint64_t token, const CallId& call) = 0;

  // Called after the last frame and before close(): send the end of the stream, drop every arriving
  // frame, and touch no memory of others. True while the peer may not have read everything: closing
  // the link then could discard it.
  virtual bool lingers() { return false; }

  // Drop everything queued. Idempotent; no callback runs afterwards.
  virtual void close() = 0;

  // In a forked child: close the descriptors, which are the parent's, and do nothing else. Those of
  // pipes are closed by SocketPipe::forsake_all().
  virtual void forsake() {}

  // ---- For the code that serves links of any kind (engine/shell/channel.h,
  // engine/shell/served_links.h, transport.h). The defaults suit a link that only pump() moves.

  // One word for people.
  virtual const char* kind() const = 0;
  // Descriptors to watch for reading, writing and the peer's end; edge-triggered.
  virtual std::vector<int> fds() const { return {}; }
  // One of the descriptors is ready. `ended`: the peer will send no more by it, which the kernel
  // reports only once. Moves at most one turn's bytes; true if anything moved.
  virtual bool on_event(FrameSink& sink, bool ended) {
    (void)ended;
    return pump(sink);
  }
  // True if the last on_event() left nothing to read, so that an event follows when more comes.
  // Otherwise on_event() must be called again.
  virtual bool is_drained() const { return true; }
  // True if the peer writes to this process's memory and rings its arena's doorbell. The driver
  // then polls has_inbound() and calls pump().
  virtual bool rings_bell() const { return false; }
  virtual bool has_inbound() const { return false; }
  // Called ten times a second. When the peer was last alive, if that is known without frames; else
  // 0.
  virtual int64_t tick() { return 0; }
  // Check timeouts: ten times a second, or fifty times if is_watchful(), so that a silent path is
  // found soon.
  virtual void look(FrameSink&, int64_t) {}
  virtual bool is_watchful() const { return false; }

  // The largest payload that send() copies. Larger ones are borrowed, or must be offered by place
  // on a link that shares memory.
  virtual size_t max_inline() const = 0;
  virtual bool shares_memory() const { return false; }

  // Give the peer a mapping of a shared region of this process. False if that is not possible now.
  virtual bool share(uint32_t) { return false; }

  // For a call: write n_bytes at `from` to a region of the peer.
  virtual Moved put(uint64_t /*token*/, const CallId&, const std::byte* /*from*/,
                    size_t /*n_bytes*/, const Remote& /*to*/) {
    return Moved::kNowhere;
  }
  // For a call: read into.n_bytes of the peer's memory.
  virtual Moved get(uint64_t /*token*/, const CallId&, const Remote& /*from*/,
                    const Into& /*into*/) {
    return Moved::kNowhere;
  }
};

}  // namespace shoal
