// The purpose of a call, so that ranks which sum unrelated buffers of one length get an error.
#pragma once

#include <cstdint>
#include <string>

namespace shoal {

// An averager's number in its group, one of its steps, and a buffer, each modulo what fits; all
// ranks must agree. 0: the call is for nothing that has a name. Travels in every frame.
using Subject = uint32_t;

constexpr uint32_t step_of(Subject subject) { return subject >> 10 & 0x3fff; }
// The averager and the buffer alone.
constexpr Subject without_step(Subject subject) { return subject & ~(uint32_t{0x3fff} << 10); }

// The words that follow the plan's descriptor in errors.
inline std::string words_for(Subject subject) {
  if (subject == 0) return "";
  return " for averager " + std::to_string(subject >> 24) + ", step " +
         std::to_string(step_of(subject)) + ", buffer " + std::to_string(subject & 0x3ff);
}

}  // namespace shoal
