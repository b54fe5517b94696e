#include "engine/life/losses.h"

#include <algorithm>

namespace shoal {

Header Loss::header() const {
  Header header;
  header.type = FrameType::kLost;
  header.flow = static_cast<uint32_t>(culprit);
  header.segment = static_cast<uint32_t>(other);
  header.count = static_cast<uint32_t>(verdict);
  return header;
}

std::optional<Loss> Loss::from(const Header& header, std::string why, int n_ranks) {
  const auto n = static_cast<uint32_t>(n_ranks);
  if (header.flow >= n || header.segment >= n || header.flow == header.segment ||
      header.count >= kVerdicts)
    return std::nullopt;
  why.resize(std::min(why.size(), kMostWords));
  return Loss{static_cast<Verdict>(header.count), static_cast<int>(header.flow),
              static_cast<int>(header.segment), std::move(why)};
}

bool Loss::ends(std::span<const int> rank_of) const {
  const auto is_in = [&](int rank) { return rank_of[static_cast<size_t>(rank)] >= 0; };
  return !rank_of.empty() && is_in(culprit) && (verdict == Verdict::kDead || is_in(other));
}

Error Loss::error_on(int rank) const {
  if (rank == culprit && verdict != Verdict::kCut)
    return {Fault::kPeerLost, other, "gave this rank up: this rank " + why};
  return {Fault::kPeerLost, culprit, why};
}

bool Loss::is_between(int one, int two) const {
  return (culprit == one && other == two) || (culprit == two && other == one);
}

bool Losses::add(const Loss& loss) {
  if (loss.verdict == Verdict::kDead) return dead_.emplace(loss.culprit, loss).second;
  if (dead_.count(loss.culprit) != 0 || dead_.count(loss.other) != 0) return false;
  return apart_.emplace(std::minmax(loss.culprit, loss.other), loss).second;
}

const Loss* Losses::between(int one, int two) const {
  for (const int rank : {one, two})
    if (const auto found = dead_.find(rank); found != dead_.end()) return &found->second;
  const auto found = apart_.find(std::minmax(one, two));
  return found != apart_.end() ? &found->second : nullptr;
}

const Loss* Losses::ends(std::span<const int> rank_of) const {
  for (const auto& [culprit, loss] : dead_)
    if (loss.ends(rank_of)) return &loss;
  for (const auto& [pair, loss] : apart_)
    if (loss.ends(rank_of)) return &loss;
  return nullptr;
}

}  // namespace shoal
