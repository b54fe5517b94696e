// What is known of ranks that were lost, by whoever found out: news that goes round once.
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
  kEvicted = 0,  // `other` has parted with `culprit`, for what that did
  kCut = 1,      // the network between the two is cut, and both live; `culprit` is out
  kDead = 2,     // nobody who was asked hears `culprit`; `other` found out
};
inline constexpr uint32_t kVerdicts = 3;

struct Loss {
  static constexpr size_t kMostWords = 512;  // one such text for each pair of ranks is kept

  Verdict verdict = Verdict::kEvicted;
  int culprit = -1, other = -1;  // mesh ranks
  std::string why;               // kCut: a sentence; else a verb phrase about the culprit

  // A frame that says so; its payload is `why`.
  Header header() const;
  // Of ranks below `n_ranks`; nothing where the numbers make no sense.
  static std::optional<Loss> from(const Header& header, std::string why, int n_ranks);
  // Groups that hold the dead end, and those that hold both of two who have parted.
  // `rank_of`: by mesh rank, -1 outside the group.
  bool ends(std::span<const int> rank_of) const;
  // What it means to `rank`: who was given up blames the one who says so.
  Error error_on(int rank) const;
  bool is_between(int one, int two) const;
};

// Threads: under the channel's lock.
class Losses {
 public:
  // False if nothing new follows from it.
  bool add(const Loss& loss);
  // What was said of the link between two ranks, if anything.
  const Loss* between(int one, int two) const;
  // Why a group cannot be used, if anything is known.
  const Loss* ends(std::span<const int> rank_of) const;

 private:
  std::map<int, Loss> dead_;                   // by culprit
  std::map<std::pair<int, int>, Loss> apart_;  // by pair, the lower first
};

}  // namespace shoal
