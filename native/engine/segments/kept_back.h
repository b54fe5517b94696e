// The residuals that lossy codecs took from complete sums, to be added to later ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "engine/segments/subject.h"
#include "fold/codec.h"

namespace shoal {

// The residuals of a group's averagers at a rank that finishes sums: a float32 for each element, by
// averager and buffer, and by the place of a segment in that buffer. They live and die with the
// group here: if a reducer is lost, so are its residuals.
//
// Threads: under the engine's lock, like all of a group.
class KeptBack {
 public:
  // Beyond this the residuals of the least recently used buffers are reset to zero.
  static constexpr size_t kMostBytes = size_t{1} << 30;

  explicit KeptBack(size_t most_bytes = kMostBytes) : most_bytes_(most_bytes) {}

  // Round complete sums of float32 by `codec`, after their residuals were added; keep the part that
  // rounding removes as the new residuals. A block that is not finite keeps its old residual.
  //
  // An averager's first step, after which its arrays move to other places, adds and keeps nothing,
  // and drops earlier residuals: an averager restarts its step count after an unused step, whose
  // residuals would otherwise reach later ones. A call without a subject adds and keeps nothing
  // either, and neither does a call for which memory is short.
  //
  // Args:
  //   tensor_bytes: of the whole buffer; residuals of another length are dropped, and all of a
  //     buffer once a segment has another length.
  //   first: the index of data[0] in the buffer.
  void round(const Narrow& codec, Subject subject, uint64_t tensor_bytes, uint64_t first,
             std::byte* data, size_t n_elems);

  size_t n_bytes() const { return n_bytes_; }

 private:
  struct OfBuffer {
    uint64_t tensor_bytes = 0;
    uint64_t last_use = 0;                         // as `n_uses_` counts
    std::map<uint64_t, std::vector<float>> parts;  // by the index of the first element
  };

  std::vector<float>* part_of(Subject subject, uint64_t tensor_bytes, uint64_t first, size_t n);
  void forget(Subject subject);
  void drop(OfBuffer& buffer);
  bool make_room(size_t n_bytes, const OfBuffer& but);

  size_t most_bytes_;
  size_t n_bytes_ = 0;
  uint64_t n_uses_ = 0;
  std::unordered_map<Subject, OfBuffer> buffers_;  // by the subject without its step
};

}  // namespace shoal
