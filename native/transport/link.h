// A pipe of frames to one peer. Knows no collectives, dtypes or chunks.
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

// Memory of the peer that this process may reach: in a region that it shares, or one of its slots.
struct Remote {
  uint32_t place = 0;   // the region, or the slot
  uint64_t offset = 0;  // in the region; in a slot: the stamp that it had when it was offered
  bool in_slot = false;
};

// Where the bytes of a get go: they are stored at `at`, or folded into what lies there. A link
// whose peer's memory is readable folds straight from that; another lands them first.
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

// What has come of a put or a get.
enum class Moved : uint8_t {
  kDone,
  kLater,    // said by put() and get() only: FrameSink::moved() tells, NOT before they return
  kNowhere,  // said by put() and get() only: the peer has no such memory; nothing was touched
  kStale,    // of a get: the slot holds other data by now, so what was read is nothing
};

// Who receives what a link brings: the engine, or a test.
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
  // In the place of sent(): the payload was written to after its checksum was taken, by this very
  // process. The peer will find it corrupt.
  virtual void spoiled(int peer, uint64_t token) = 0;
  // A put or get that was under way is kDone or kStale.
  virtual void moved(int peer, uint64_t token, Moved how) = 0;
  // See Link::release().
  virtual void released(int peer, uint64_t token) = 0;
  // At most once, the last call. What the link can still send goes with flush(), until close(); it
  // touches no memory that it was asked back, and says no more that it has let go of it.
  virtual void broken(int peer, const Error& error) = 0;
};

// Threads: under the channel's lock.
// Buffers: a frame's payload is borrowed from send() until send() returns true, sent(token) runs,
// or the link is closed or broken. Over paths that is when the peer has acknowledged it. What a put
// reads and a get writes to is borrowed until that has come to its end. release() ends all of it.
class Link {
 public:
  virtual ~Link() = default;

  // Queues a frame; never blocks. True if the payload is free again already (sent() then does not
  // run).
  virtual bool send(const Frame& frame) = 0;

  // Hands what is queued to the medium and wakes the peer if it sleeps. True if anything moved.
  virtual bool flush(FrameSink& sink) = 0;

  // flush(), and delivers what has come. True if anything moved.
  virtual bool pump(FrameSink& sink) = 0;

  // Frames wait in this link for room in the kernel or the ring.
  virtual bool has_queued() const = 0;

  // flush() stopped because it had moved enough for one turn; nobody will tell when to go on.
  virtual bool is_unflushed() const { return false; }

  // No way leads to the peer, since nobody has needed one yet. Nothing is tried, and no time
  // counts.
  virtual bool is_unlinked() const { return false; }
  // Makes that way, as send() does of anything but a heartbeat or a goodbye. Nothing, if there is
  // one or it is being made.
  virtual void dial() {}
  // No way leads to the peer now, and one is being made. Its silence means nothing.
  virtual bool is_suspended() const { return false; }
  // It holds data that the peer may not have, of calls that may have ended well here.
  virtual bool owes_data() const { return has_queued(); }
  // Since when a silent peer could have been heard, as of the last look(); 0: ever.
  virtual int64_t listens_since() const { return 0; }

  // For people to read; costs a few microseconds.
  virtual LinkState state() const { return {}; }

  // Asks for the memory of a call back: payloads that it has lent are dropped (or copied, where the
  // frame is half sent), frames of it that come are diverted, its puts and gets are given up and
  // come to no end. Those of another call stay, also where they use the same memory. True: from
  // here on this link neither reads nor writes anything for that call. False: that is so once
  // released(token) runs, or the link is broken or closed.
  virtual bool release(uint64_t token, const CallId& call) = 0;

  // After the last frame, before close(): says that nothing more comes, throws away what does, and
  // touches no memory of others.
  // True while the peer may not have read everything: closing then could take it back.
  virtual bool lingers() { return false; }

  // Drops everything queued; idempotent; nothing is called afterwards.
  virtual void close() = 0;

  // In a forked child: closes the descriptors, which are the parent's, and does nothing else. Those
  // of pipes are seen to (socket_pipe.h).
  virtual void forsake() {}

  // ---- For whoever serves it, who knows no kind of link (engine/shell/channel.h,
  // engine/shell/served_links.h, transport.h). The defaults are those of a link that only pump()
  // moves.

  // One word for people.
  virtual const char* kind() const = 0;
  // Descriptors to watch for reading, writing and the peer's end; edge-triggered.
  virtual std::vector<int> fds() const { return {}; }
  // One of them has told of something; `ended`: that the peer will send no more by it, which the
  // kernel does not tell again. Moves what one turn may. True if anything moved.
  virtual bool on_event(FrameSink& sink, bool ended) {
    (void)ended;
    return pump(sink);
  }
  // Whether the last on_event() left nothing to read: the descriptors will tell when more comes.
  // Else it is to be called again, since nobody will.
  virtual bool is_drained() const { return true; }
  // The peer writes to memory of this process and rings the doorbell of its arena: whoever drives
  // looks at has_inbound(), and pumps.
  virtual bool rings_bell() const { return false; }
  virtual bool has_inbound() const { return false; }
  // Ten times a second. When the peer was alive, where it does not say so in frames; else 0.
  virtual int64_t tick() { return 0; }
  // Looks at what time has changed, ten times a second; is_watchful(): fifty times, so that a path
  // that falls silent is found soon.
  virtual void look(FrameSink&, int64_t) {}
  virtual bool is_watchful() const { return false; }

  // The largest payload send() takes by copy without `sent`; larger ones are borrowed, or for
  // links that share memory must be offered by place.
  virtual size_t max_inline() const = 0;
  virtual bool shares_memory() const { return false; }

  // Gives the peer a mapping of a shared region of this process. False if that cannot be done now.
  virtual bool share(uint32_t) { return false; }

  // For a call: writes n_bytes from `from` to a region of the peer's.
  virtual Moved put(uint64_t /*token*/, const CallId&, const std::byte* /*from*/,
                    size_t /*n_bytes*/, const Remote& /*to*/) {
    return Moved::kNowhere;
  }
  // For a call: reads into.n_bytes of the peer's.
  virtual Moved get(uint64_t /*token*/, const CallId&, const Remote& /*from*/,
                    const Into& /*into*/) {
    return Moved::kNowhere;
  }
};

}  // namespace shoal
