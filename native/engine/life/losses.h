// The ranks that were lost, as reported by the rank that noticed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "transport/frame.h"

namespace shoal {

enum class Verdict : uint32_t {
  kEvicted = 0,  // `other` gave `culprit` up for a fault of its own
  kCut = 1,      // the network between the two is cut and both live; `culprit` leaves the group
  kDead = 2,     // no rank asked can reach `culprit`; `other` noticed
};
inline constexpr uint32_t kVerdicts = 3;

struct Loss {
  static constexpr size_t kMostWords = 512;  // one such text for each pair of ranks is kept

  Verdict verdict = Verdict::kEvicted;
  int culprit = -1, other = -1;  // mesh ranks
  std::string why;               // kCut: a sentence; else a verb phrase about the culprit

  // The header of the frame that reports it; the payload is `why`.
  Header header() const;
  // Parse such a frame; nothing if a rank is not below `n_ranks` or the verdict is unknown.
  static std::optional<Loss> from(const Header& header, std::string why, int n_ranks);
  // True if it ends a group: one with the dead rank in it, or with both ranks of a lost link.
  // `rank_of`: the group rank by mesh rank, -1 outside the group.
  bool ends(std::span<const int> rank_of) const;
  // The error on `rank`; the culprit's own error names `other`.
  Error error_on(int rank) const;
  bool is_between(int one, int two) const;
};

// Threads: under the channel's lock.
class Losses {
 public:
  // Record a loss; false if it adds nothing to the known ones.
  bool add(const Loss& loss);
  // The loss recorded for the link between two ranks, or null.
  const Loss* between(int one, int two) const;
  // A loss that ends the group, or null.
  const Loss* ends(std::span<const int> rank_of) const;

 private:
  std::map<int, Loss> dead_;                   // by culprit
  std::map<std::pair<int, int>, Loss> apart_;  // by pair, the lower first
};

}  // namespace shoal
