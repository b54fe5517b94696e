// Counts the entries that each fusion buffer waits for, and reports the buffers that are full.
//
// A step begins with nothing counted. An entry lies in one buffer or spans several; a buffer is
// full when all its entries are counted.
//
// Threads: one at a time, but while `full` runs other threads may count.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/clock.h"

namespace shoal {

class Countdown {
 public:
  // Begins a step with another set of buffers. `buffers_of`: by entry, numbers below `n_buffers`.
  void lay_out(const std::vector<std::vector<uint32_t>>& buffers_of, uint32_t n_buffers) {
    first_.assign(1, 0);
    buffers_.clear();
    n_entries_of_.assign(n_buffers, 0);
    for (const auto& buffers : buffers_of) {
      for (const uint32_t buffer : buffers) {
        buffers_.push_back(buffer);
        ++n_entries_of_[buffer];
      }
      first_.push_back(static_cast<uint32_t>(buffers_.size()));
    }
    is_counted_.assign(buffers_of.size(), false);
    begin();
  }

  // Begins a step.
  void begin() {
    left_ = n_entries_of_;
    for (const uint32_t entry : order_) is_counted_[entry] = false;
    order_.clear();
    order_.reserve(is_counted_.size());
    full_ns_.assign(left_.size(), 0);
    first_ns_ = 0;
    repeated_ = -1;
  }

  // Counts an entry; calls `full(buffer)` for each buffer that it fills, until a call returns
  // false. Returns whether none did. An entry counted twice is only recorded.
  template <class Full>
  bool count(uint32_t entry, Full&& full) {
    if (paused) return true;
    if (is_counted_[entry]) {
      if (repeated_ < 0) repeated_ = static_cast<int64_t>(entry);
      return true;
    }
    is_counted_[entry] = true;
    if (order_.empty()) first_ns_ = now_ns();
    order_.push_back(entry);
    const uint32_t end = first_[entry + 1];
    for (uint32_t at = first_[entry]; at < end; ++at) {
      const uint32_t buffer = buffers_[at];
      if (--left_[buffer] != 0) continue;
      full_ns_[buffer] = now_ns();
      if (!full(buffer)) return false;
    }
    return true;
  }

  size_t n_entries() const { return is_counted_.size(); }
  size_t n_buffers() const { return left_.size(); }
  // The results of this step.
  const std::vector<uint32_t>& order() const { return order_; }  // in the order counted
  bool is_counted(uint32_t entry) const { return is_counted_[entry]; }
  int64_t repeated() const { return repeated_; }  // the first one counted twice; -1: none
  int64_t first_ns() const { return first_ns_; }  // when the first entry was counted; 0: none yet
  // By buffer: when it became full; 0: not yet.
  const std::vector<int64_t>& full_ns() const { return full_ns_; }

  bool paused = false;  // nothing is counted

 private:
  std::vector<uint32_t> first_{0};  // by entry: where its buffers begin in `buffers_`
  std::vector<uint32_t> buffers_;
  std::vector<uint32_t> n_entries_of_;  // by buffer
  std::vector<uint32_t> left_;          // by buffer
  std::vector<bool> is_counted_;        // by entry
  std::vector<uint32_t> order_;
  std::vector<int64_t> full_ns_;
  int64_t first_ns_ = 0;
  int64_t repeated_ = -1;
};

}  // namespace shoal
