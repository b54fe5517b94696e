// The table of frame types: the links each travels over, its contents, when it is sent, and what
// follows. A frame that breaks a rule breaks the link before the engine sees it. docs/wire.md shows
// the same table.
#pragma once

#include <span>
#include <string>

#include "transport/frame.h"

namespace shoal {

// Links, as bits.
inline constexpr uint8_t kOverRing = 1;    // shared memory of one host
inline constexpr uint8_t kOverTcp = 2;     // between hosts
inline constexpr uint8_t kOverSocket = 4;  // the Unix socket beside a ring: descriptors ride along

enum class Carries : uint8_t {
  kNothing,
  kPlace,
  kLengths,  // or nothing: the engine knows which calls need them
  kSegment,
  kText,  // the text of an error, at most kMaxText bytes
};

struct FrameRule {
  FrameType type;
  const char* name;
  uint8_t over;
  uint16_t flags;  // those that it may bear
  Carries carries;
  const char* when;     // who sends it, when
  const char* meaning;  // what it states
  const char* follows;  // what the sender may expect
};

// In the order of their types, from 1 on.
std::span<const FrameRule> frame_rules();

// The fault of a frame that came over such a link, without regard to calls; empty if none.
std::string broken_rule(const Header& header, size_t n_bytes, uint8_t over);

}  // namespace shoal
