// The 64-byte frame header, used by every link. docs/wire.md lists the bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace shoal {

enum class FrameType : uint8_t {
  kPost = 1,      // "I have posted this call": group, key, descriptor; perhaps Lengths
  kGrant = 2,     // "segments below `segment` of your flow may come"; may name a place to put them
  kData = 3,      // one segment of a flow, payload in the frame
  kOffer = 4,     // segments [segment, segment + count) of a flow lie in shared memory
  kConsumed = 5,  // "I have consumed segments below `segment` of your flow"
  kPutComplete = 6,    // "the `count` segments before `segment` of my flow lie where you granted"
  kRequestToSend = 7,  // "my eager allowance is spent; grant this flow"
  kCredit = 8,         // gives back `place.offset` bytes of eager allowance
  kDisagree = 9,       // payload: what I called under this key
  kAbort = 10,         // payload: why this group ends; flow = culprit rank, count = fault
  kLost = 11,          // "rank `flow` is lost, as rank `segment` found"; count: how; payload: why
  kGoodbye = 12,       // orderly end of the link
  kHeartbeat = 13,
  kRegion = 14,   // a shared region's descriptor rides along (SCM_RIGHTS)
  kRelease = 15,  // the region is gone: drop the mapping
  kAck = 16,      // nothing but its header's `acknowledged`
  kAsk = 17,      // "do you receive from rank `flow`?"; to that rank itself: "are you alive?"
  kAnswer = 18,   // "I receive from rank `flow`", or not: count
  kUnmade = 19,   // "I do not know the members of this group": pass its end on without me
  kCommit = 20,   // "I hold all results that you owe me"; a server: "all workers hold mine"
};

// Sixteen more bytes, carried as the payload of kGrant, kOffer, kCredit, kRegion and kRelease.
struct Place {
  uint32_t region = 0;  // 0: none; kOffer with kInSlot: the slot's number
  uint32_t cts_flow =
      kNoFlow;  // kGrant: segment s is granted once you consumed s of my flow `cts_flow`
  // Bytes into the region of the flow's (kOffer: the segment's) first byte; kInSlot: its stamp.
  uint64_t offset = 0;

  static constexpr uint32_t kNoFlow = 0xffffffff;
};
static_assert(sizeof(Place) == 16);

// The payload of kPost if only the two ranks know the length of the blocks between them, in bytes.
struct Lengths {
  uint64_t sent = 0;      // by the sender of the frame
  uint64_t received = 0;  // by the sender of the frame
};
static_assert(sizeof(Lengths) == sizeof(Place));

struct Header {
  static constexpr uint64_t kUnsealed = 0x6172666c616f6873;  // "shoalfra", little endian
  static constexpr uint8_t kVersion = 5;
  // Larger frames would hold a connection longer than a heartbeat at 10 Mbit/s.
  static constexpr uint32_t kMaxPayload = 4u << 20;

  // Over paths: header_seal.h. In a ring, where only the peer can write, it is always the same.
  uint64_t seal = kUnsealed;
  uint8_t version = kVersion;
  FrameType type = FrameType::kHeartbeat;
  uint16_t flags = 0;
  uint32_t payload_crc = 0;
  // Over paths only: the frame's number on the link, from 1 (0: not kept for sending again), and
  // the number up to which all frames of the peer have arrived. The low halves of 64-bit counters.
  uint32_t sequence = 0;
  uint32_t acknowledged = 0;
  uint64_t group = 0;
  uint64_t key = 0;
  uint32_t descriptor = 0;
  uint32_t subject = 0;  // engine/segments/subject.h
  uint32_t flow = 0;
  uint32_t segment = 0;
  uint32_t count = 0;
  uint32_t length = 0;  // payload bytes behind this header

  // The path of its link by which a frame arrived; set by the link that received it.
  static constexpr uint32_t kMaxPaths = 8;
  static constexpr uint16_t kPathFlags = 0xe000;
  uint32_t path() const { return flags >> 13; }
  void set_path(uint32_t path) {
    flags = static_cast<uint16_t>((flags & 0x1fffu) | (path & (kMaxPaths - 1)) << 13);
  }
};
static_assert(sizeof(Header) == 64);

// Texts of errors are cut to this length.
inline constexpr uint32_t kMaxText = 4096;

// kOffer: the payload lies in one of the sender's slots and holds it until kConsumed.
inline constexpr uint16_t kInSlot = 1;

// kData: sent before the receiver granted it; counts against the eager allowance.
inline constexpr uint16_t kEager = 2;

// Over paths: acknowledge soon, because the sender waits to reuse the frame's memory.
inline constexpr uint16_t kAckSoon = 4;

// The order in which waiting bulk data leaves for a peer: the oldest call first, and within a call
// the step furthest down the schedule.
struct Precedence {
  uint64_t call = 0;
  uint32_t steps_left = 0;
  auto operator<=>(const Precedence&) const = default;
};

// The call of a frame: keys in flight are unique within a group.
struct CallId {
  uint64_t group = 0, key = 0;
  bool operator==(const CallId&) const = default;
};
inline CallId call_of(const Header& header) { return {header.group, header.key}; }

// A frame on its way out. The payload is borrowed until the link reports it sent; small ones
// travel in `small` and are never borrowed.
struct Frame {
  Header header;
  const std::byte* payload = nullptr;  // nullptr: `small` holds header.length bytes
  uint64_t token = 0;                  // passed to FrameSink::sent; 0: no notice needed
  // The payload is memory of the call that the header names, which may ask for its release.
  bool is_lent_by_call = false;
  Precedence precedence;  // of data
  bool is_bulk = false;   // part of a long flow, even if this frame is short
  std::array<std::byte, sizeof(Place)> small{};

  template <class Small = Place>
  void carry(const Small& what) {
    static_assert(sizeof(Small) == sizeof(small));
    header.length = sizeof(Small);
    std::memcpy(small.data(), &what, sizeof(Small));
  }
  const std::byte* bytes() const { return payload != nullptr ? payload : small.data(); }
  bool is_lent_by(const CallId& call) const {
    return is_lent_by_call && payload != nullptr && call_of(header) == call;
  }
};

}  // namespace shoal
