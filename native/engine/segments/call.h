// One call in flight: a plan bound to memory, and how far each of its steps has come. Or one lane
// of such a call; what is said of segments is said of its own, then.
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
class Way;  // how a segment moves, see way.h
class FrameWay;
class PlaceWay;

// A segment that came in a frame before its step could use it.
struct Arrived {
  uint32_t segment = 0;
  Block block;  // holds the bytes, unless they landed where they belong
  bool in_place = false;
  FrameWay* way = nullptr;  // by which it came
};

// Segments [first, first + count) of a flow that lie in memory that both ranks share.
struct Offered {
  uint32_t first = 0, count = 0;
  PlaceWay* way = nullptr;  // by which they are offered; it knows what the rest means
  uint32_t place = 0;       // the peer's region, or slot
  uint64_t offset = 0;      // of segment `first`; in a slot: the slot's stamp
};

// Chunks of DATA, and for each a bitmap: bit s of byte s / 8.
using Landed = std::vector<std::pair<uint32_t, std::vector<uint8_t>>>;

struct StepState {
  uint32_t n_segments = 0;
  // Sends and receives: how the flow is encoded; nullptr: it travels as it is. Finishes: what the
  // value is rounded to, since it leaves so.
  const Narrow* codec = nullptr;
  uint32_t started = 0;      // sends: segments handed to the link
  uint32_t done = 0;         // segments whose memory this step no longer touches
  bool takes_turns = false;  // sends: see turns.h
  bool is_moving = false;    // a put or get of the next segment is under way
  Block landing;             // where a get lands that may not touch the segment before it is whole
  int64_t moved_ns = 0;      // when `done` last changed, by the last tick's clock
  bool is_eager = false;     // sends and receives: so short a flow that it goes without asking
  // Sends: how the next segment moves, and how if the receiver had granted no place for it.
  Way* way = nullptr;
  Way* unplaced = nullptr;
  // Sends: what the receiver allows.
  uint32_t granted = 0;
  uint32_t cts_flow = Place::kNoFlow;
  uint32_t region = 0;  // the receiver's, to put segments there
  uint64_t offset = 0;
  uint32_t unreported = 0;  // segments put there since the receiver was last told
  bool request_sent = false;
  bool waits_for_slot = false;
  bool by_reference = false;    // the receiver reads this chunk itself
  std::vector<uint32_t> ahead;  // segments above `done` whose memory is free already
  // Receives: what was allowed and what came.
  uint32_t grant_sent = 0;
  bool place_granted = false;  // the sender may write to this chunk itself
  uint32_t reserved = 0;       // segments of staging promised to the sender
  uint32_t consumed_sent = 0;
  bool is_requested = false;
  std::vector<Arrived> arrived;
  std::vector<Offered> offered;
};

// A call ends when its last step is over, or before its time. Then no step of it runs, no peer
// hears of it, and it is not in flight. It is finished when its memory is the caller's again: at
// once, or where it has failed when all links have let go of that.
//
// Threads: under the channel's lock, except `finished`.
struct Call : std::enable_shared_from_this<Call> {
  Group* group = nullptr;  // this and the next two: see Group::own
  uint64_t group_id = 0;
  const std::vector<int>* members = nullptr;
  std::shared_ptr<const Plan> plan;
  uint64_t key = 0;
  Subject subject = 0;
  uint64_t serial = 0;  // which call on this group, for messages
  // Which of all calls: those of higher priority have lower ones, and then those made earlier.
  uint64_t order = 0;
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
  bool is_through = false;       // nothing is left of it; Calls has yet to end it
  uint64_t n_far_bytes = 0;      // that come from other hosts, as they travel
  struct Staged {
    uint32_t version, segment, slot;
    uint64_t stamp;  // of the slot when it was filled: other calls may have taken it since
  };
  std::vector<Staged> staged;  // slots that hold a value that further sends of it may share
  uint32_t steps_left = 0;

  // What those parts of a channel know of it after which they are named.
  PostsOf posts;
  TurnsOf turns;
  ScratchOf scratch;
  WindowsOf windows;
  CommitsOf commits;

  Error error;
  bool ended = false;
  uint32_t n_unreleased = 0;  // what links were asked to let go of and still hold (releases.h)
  int64_t finished_ns = 0;    // by the clock; of a lane: its own
  std::atomic<bool> finished{false};

  // Of the whole call, for whoever made it: Threads: any.
  bool is_over() const {
    return lane.of != nullptr ? lane.of->have_ended() : finished.load(std::memory_order_acquire);
  }
  const Error& outcome() const { return lane.of != nullptr ? lane.of->error() : error; }
  int64_t over_ns() const {  // once it is over: since when
    int64_t last = finished_ns;
    for (const auto& other : other_lanes) last = std::max(last, other->finished_ns);
    return last;
  }

  CallId id() const { return {group_id, key}; }
  std::byte* chunk(int buffer, uint32_t chunk) const {
    const auto& pointers = memory[buffer];
    return pointers.size() > 1 ? pointers[chunk] : pointers[0] + plan->layout[buffer].offset[chunk];
  }
  // All memory of the call that is contiguous with a chunk.
  std::pair<const std::byte*, const std::byte*> extent(int buffer, uint32_t index) const {
    const auto& layout = plan->layout[buffer];
    const std::byte* begin = chunk(buffer, index);
    // Other calls may work on what lies between chunks that servers fold.
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
  // The same on its way to or from a peer: of a send or receive, as its flow is encoded.
  size_t wire_bytes(uint32_t at, uint32_t segment) const {
    const Step& step = plan->program->steps[at];
    return as_encoded(at, segment_bytes(step, segment));
  }
  // Of so many bytes in memory.
  size_t as_encoded(uint32_t at, uint64_t n_bytes) const {
    const Narrow* codec = state[at].codec;
    return codec == nullptr ? n_bytes : n_bytes / size_of(plan->dtype) * codec->item_bytes;
  }
  std::byte* segment_at(int buffer, uint32_t chunk_index, uint32_t segment) const {
    if (is_served) {
      const Window& window = windows.of_chunk[chunk_index];
      return window.blocks[segment - window.first].data();
    }
    return chunk(buffer, chunk_index) + segment_offset(segment);
  }
  // Up to where the segments of `step` from `from` on lie on pages that hold no memory but this
  // call's: only such pages can be taken away from a peer. At most `upto`; `from` if not even one.
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
  // Up to where segments of a receive may be sent at all.
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
  // What its scratch counts for under the staging ceiling: lanes share it.
  uint64_t scratch_share() const {
    return (plan->scratch_bytes + plan->n_lanes - 1) / plan->n_lanes;
  }
  std::shared_ptr<std::byte[]> new_scratch() const {
    return lane.of != nullptr ? lane.of->scratch(plan->scratch_bytes)
                              : uncleared(plan->scratch_bytes);
  }
  int peer_of(const Step& step) const { return (*members)[step.peer]; }  // mesh rank
  // Whether a segment of a receive may not be touched before all of its result is here: the rest
  // is the input still, to reduce again when the server is lost.
  bool lands_whole(const Step& step) const {
    return step.kind == StepKind::kRecv && step.buffer != kScratch && plan->is_server(step.peer);
  }
  bool is_held(int peer) const { return posts.standing[peer] == PostsOf::kHeld; }
  // Whether the memory that a step works on is there.
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
  // What the receiver of a send allows, counting its promise to be ready once this rank has
  // consumed its own flow.
  uint32_t granted(uint32_t at) const;
  // Where the next segment of a receive goes, where it travels as it is.
  Into next_of(uint32_t at) const;
  // Folds or stores the next segment of a receive, as it travelled.
  void use(uint32_t at, const std::byte* from) const;

  // Of each chunk that a server reduces, a bit for each of its segments (of all lanes): those of
  // this lane that hold the result. All others are as the caller gave them.
  Landed landed() const;

  Frame frame(FrameType type, uint32_t flow, uint32_t segment) const;
  Frame post_notice(int peer) const;
  // What it does and what for, in words for people.
  std::string what() const { return plan->descriptor + words_for(subject); }
  std::string doing() const { return what() + " (call " + std::to_string(serial) + ")"; }
  bool is_that_of(const Header& header) const {
    return header.descriptor == plan->descriptor_hash && header.subject == subject;
  }
};

// Of a whole call that is over, given its first lane.
Landed landed_of(const Call& call);

}  // namespace shoal
