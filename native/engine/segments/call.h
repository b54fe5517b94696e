// A call in flight, or one lane of it: a plan bound to memory, and the progress of its steps. In a
// lane, segments are the lane's own.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/shared_memory.h"
#include "engine/segments/call_parts.h"
#include "engine/segments/lanes.h"
#include "engine/segments/program.h"
#include "engine/segments/staging.h"
#include "engine/segments/subject.h"
#include "transport/link.h"

namespace shoal {

struct Group;
class KeptBack;
class Way;  // how a segment moves, see way.h
class FrameWay;
class PlaceWay;

// A segment that arrived in a frame before its step could use it.
struct Arrived {
  uint32_t segment = 0;
  Block block;  // holds the bytes, unless they landed where they belong
  bool in_place = false;
  FrameWay* way = nullptr;  // the way in which it arrived
};

// Segments [first, first + count) of a flow, in memory shared by both ranks.
struct Offered {
  uint32_t first = 0, count = 0;
  PlaceWay* way = nullptr;  // the way of the offer, which interprets the fields below
  uint32_t place = 0;       // the peer's region, or slot
  uint64_t offset = 0;      // of segment `first`; in a slot: the slot's stamp
};

// Chunks of DATA, and for each a bitmap: bit s of byte s / 8.
using Landed = std::vector<std::pair<uint32_t, std::vector<uint8_t>>>;

struct StepState {
  uint32_t n_segments = 0;
  // Sends and receives: the encoding of the flow; null: none. Finishes: the encoding in which the
  // value leaves, to which it is therefore rounded.
  const Narrow* codec = nullptr;
  uint32_t started = 0;      // sends: segments handed to the link
  uint32_t done = 0;         // segments whose memory this step no longer touches
  bool takes_turns = false;  // sends: see turns.h
  bool is_moving = false;    // a put or get of the next segment is under way
  Block landing;             // the target of a get that must not write a partial segment in place
  int64_t moved_ns = 0;      // when `done` last changed, by the last tick's clock
  bool is_eager = false;  // sends and receives: the flow is short enough to leave without a grant
  // Sends: the way of the next segment, and its way without a place granted by the receiver.
  Way* way = nullptr;
  Way* unplaced = nullptr;
  // Sends: what the receiver has granted.
  uint32_t granted = 0;
  uint32_t cts_flow = Place::kNoFlow;
  uint32_t region = 0;  // the receiver's region, to put segments there
  uint64_t offset = 0;
  uint32_t unreported = 0;  // segments put there since the last report to the receiver
  bool request_sent = false;
  bool waits_for_slot = false;
  bool by_reference = false;    // the receiver reads this chunk itself
  std::vector<uint32_t> ahead;  // segments above `done` whose memory is free already
  // Receives: what was granted and what has arrived.
  uint32_t grant_sent = 0;
  bool place_granted = false;  // the sender may write to this chunk itself
  uint32_t reserved = 0;       // segments of staging promised to the sender
  uint32_t consumed_sent = 0;
  bool is_requested = false;
  std::vector<Arrived> arrived;
  std::vector<Offered> offered;
};

// A call ends when its last step is over, or when it fails. From then on it is not in flight: no
// step runs and no frame of it is sent. It is finished when its memory is the caller's again: at
// once, or after a failure when all links have released the memory.
//
// Threads: under the channel's lock, except `finished`.
struct Call : std::enable_shared_from_this<Call> {
  Group* group = nullptr;  // this and the next three: see Group::own
  uint64_t group_id = 0;
  const std::vector<int>* members = nullptr;
  KeptBack* kept_back = nullptr;
  std::shared_ptr<const Plan> plan;
  uint64_t key = 0;
  Subject subject = 0;
  uint64_t serial = 0;  // the number of the call in its group, for errors
  uint64_t order = 0;   // among all calls, by time
  int64_t deadline_ns = 0;
  int64_t posted_ns = 0;   // by the last tick's clock
  bool unmatched = false;  // a receive that waits for its message, see messages.h
  int source = -1;         // of a message, once it is known: group rank
  Lane lane;
  std::vector<std::shared_ptr<Call>> other_lanes;  // of the first lane: for landed_of()
  bool is_served = false;  // no caller made it (served_calls.h); its scratch is windows
  int served_for = -1;     // the group rank whose frame began it

  // One pointer: a base that the layout's offsets count from. Several: one per chunk.
  std::vector<std::byte*> memory[kBuffers];

  std::vector<StepState> state;  // by step
  std::vector<uint32_t> ready;   // steps to attempt, newest first: a segment is carried through all
                                 // its steps while it is warm in the cache
  bool queued = false;           // in Steps::runnable_
  bool is_through = false;       // all steps are over; Calls has yet to end it
  uint64_t n_far_bytes = 0;      // bytes to receive from other hosts, as encoded
  struct Staged {
    uint32_t version, segment, slot;
    uint64_t stamp;  // of the slot when it was filled: other calls may have taken it since
  };
  std::vector<Staged> staged;  // slots that hold a value that further sends of it may share
  uint32_t steps_left = 0;

  // The state that belongs to the part of the channel in each name.
  PostsOf posts;
  TurnsOf turns;
  ScratchOf scratch;
  WindowsOf windows;
  CommitsOf commits;

  Error error;
  bool ended = false;
  uint32_t n_unreleased = 0;  // links that have yet to release its memory (releases.h)
  int64_t finished_ns = 0;    // by the clock; of a lane: its own
  std::atomic<bool> finished{false};

  // Of the whole call, for its caller. Threads: any.
  bool is_over() const {
    return lane.of != nullptr ? lane.of->have_ended() : finished.load(std::memory_order_acquire);
  }
  const Error& outcome() const { return lane.of != nullptr ? lane.of->error() : error; }
  int64_t over_ns() const {  // when it ended; valid once it is over
    int64_t last = finished_ns;
    for (const auto& other : other_lanes) last = std::max(last, other->finished_ns);
    return last;
  }

  CallId id() const { return {group_id, key}; }
  std::byte* chunk(int buffer, uint32_t chunk) const {
    const auto& pointers = memory[buffer];
    return pointers.size() > 1 ? pointers[chunk] : pointers[0] + plan->layout[buffer].offset[chunk];
  }
  // The memory of the call that is contiguous with a chunk.
  std::pair<const std::byte*, const std::byte*> extent(int buffer, uint32_t index) const {
    const auto& layout = plan->layout[buffer];
    const std::byte* begin = chunk(buffer, index);
    // Other calls may work on the memory between chunks that servers fold.
    if (memory[buffer].size() > 1 || plan->n_workers > 0)
      return {begin, begin + layout.n_bytes[index]};
    return {memory[buffer][0], memory[buffer][0] + layout.offset.back() + layout.n_bytes.back()};
  }
  // Where a segment lies in its chunk, in bytes.
  uint64_t segment_offset(uint32_t segment) const {
    return (uint64_t{segment} * plan->n_lanes + lane.index) * plan->segment_bytes;
  }
  size_t segment_bytes(const Step& step, uint32_t segment) const {
    const uint64_t whole = plan->chunk_bytes(step.buffer, step.chunk);
    const uint64_t from = segment_offset(segment);
    return static_cast<size_t>(std::min<uint64_t>(plan->segment_bytes, whole - from));
  }
  // The bytes of a segment on the wire: as its flow is encoded.
  size_t wire_bytes(uint32_t at, uint32_t segment) const {
    const Step& step = plan->program->steps[at];
    return as_encoded(at, segment_bytes(step, segment));
  }
  // The bytes on the wire of `n_bytes` in memory.
  size_t as_encoded(uint32_t at, uint64_t n_bytes) const {
    const Narrow* codec = state[at].codec;
    return codec == nullptr ? n_bytes : codec->bytes_of(*codec, n_bytes / size_of(plan->dtype));
  }
  std::byte* segment_at(int buffer, uint32_t chunk_index, uint32_t segment) const {
    if (is_served) {
      const Window& window = windows.of_chunk[chunk_index];
      return window.blocks[segment - window.first].data();
    }
    return chunk(buffer, chunk_index) + segment_offset(segment);
  }
  // The end, at most `upto`, of the segments of `step` that start at `from` and lie on pages with
  // no memory but this call's: only such pages can be taken away from a peer. `from` if there are
  // none.
  uint32_t fenceable(const Regions::Region& region, const Step& step, uint32_t from,
                     uint32_t upto) const {
    const auto [lo, hi] = extent(step.buffer, step.chunk);
    const std::byte* begin = segment_at(step.buffer, step.chunk, from);
    const auto alone = [&, lo = lo, hi = hi](uint32_t end) {
      const std::byte* last = segment_at(step.buffer, step.chunk, end - 1);
      const size_t n_bytes = static_cast<size_t>(last - begin) + segment_bytes(step, end - 1);
      return Regions::alone_on_pages(region, begin, n_bytes, lo, hi);
    };
    if (from == upto || !alone(from + 1)) return from;
    while (!alone(upto)) --upto;  // only the last page is in question: a few segments at most
    return upto;
  }
  // The segments of `step` whose predecessors are done.
  uint32_t segments_ready(const Step& step) const {
    uint32_t ready_upto = plan->n_segments(step, lane.index);
    for (const uint32_t before : step.waits_for)
      ready_upto = std::min(ready_upto, state[before].done);
    return is_served ? std::min(ready_upto, windows.of_chunk[step.chunk].end()) : ready_upto;
  }
  // The segment of a receive up to which the peer may send.
  uint32_t may_come(uint32_t at) const {
    if (!windows.is_incast) return state[at].n_segments;
    return windows.of_chunk[plan->program->steps[at].chunk].end();
  }
  // Bytes between this rank and a peer, in plans `by_pair`.
  Lengths lengths_with(int peer) const {
    const auto bytes = [&](const std::vector<uint32_t>& flows) {
      if (flows.empty()) return uint64_t{0};
      const Step& step = plan->program->steps[flows[0]];
      return plan->chunk_bytes(step.buffer, step.chunk);
    };
    return {bytes(plan->program->sends_to[peer]), bytes(plan->program->recvs_from[peer])};
  }
  // The part of its scratch that counts under the staging ceiling: lanes share the scratch.
  uint64_t scratch_share() const {
    return (plan->scratch_bytes + plan->n_lanes - 1) / plan->n_lanes;
  }
  std::shared_ptr<std::byte[]> new_scratch() const {
    return lane.of != nullptr ? lane.of->scratch(plan->scratch_bytes)
                              : uncleared(plan->scratch_bytes);
  }
  int peer_of(const Step& step) const { return (*members)[step.peer]; }  // mesh rank
  // True if a segment of a receive must not be written before its whole result is here: until then
  // it is the input, which is reduced again if the server is lost.
  bool lands_whole(const Step& step) const {
    return step.kind == StepKind::kRecv && step.buffer != kScratch && plan->is_server(step.peer);
  }
  bool is_held(int peer) const { return posts.standing[peer] == PostsOf::kHeld; }
  // True if the memory that a step works on is allocated.
  bool has_memory(const Step& step) const {
    const bool in_scratch =
        step.buffer == kScratch || (step.kind == StepKind::kCopy && step.into_buffer == kScratch);
    return !in_scratch || is_served || scratch.memory != nullptr;
  }
  // The same for one segment of it.
  bool has_memory(const Step& step, uint32_t segment) const {
    if (!is_served) return has_memory(step);
    const Window& window = windows.of_chunk[step.chunk];
    return window.first <= segment && segment < window.end();
  }
  // The segments granted to a send, including those granted implicitly once this rank has consumed
  // the receiver's own flow.
  uint32_t granted(uint32_t at) const;
  // The target of the next segment of a receive that is not encoded.
  Into next_of(uint32_t at) const;
  // Divide the next segment of a Finish, and round it if it leaves encoded.
  void finish(uint32_t at) const;
  // Fold or store the next segment of a receive, decoding it.
  void use(uint32_t at, const std::byte* from) const;

  // For each chunk that a server reduces, one bit per segment (of all lanes): set if this lane has
  // stored the result there. All other segments are as the caller gave them.
  Landed landed() const;

  Frame frame(FrameType type, uint32_t flow, uint32_t segment) const;
  Frame post_notice(int peer) const;
  // The call's description in errors, with its subject.
  std::string what() const { return plan->descriptor + words_for(subject); }
  std::string doing() const { return what() + " (call " + std::to_string(serial) + ")"; }
  bool is_that_of(const Header& header) const {
    return header.descriptor == plan->descriptor_hash && header.subject == subject;
  }
};

// The same for a whole call that is over, given its first lane.
Landed landed_of(const Call& call);

}  // namespace shoal
