// The last finished calls of a group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <memory_resource>
#include <string>
#include <unordered_map>

#include "engine/segments/program.h"
#include "engine/segments/subject.h"

namespace shoal {

// Remembers what each call was, so that a late frame of a different call under its key is noticed.
//
// Threads: under the channel's lock.
class FinishedCalls {
 public:
  // Calls by number, by name and messages share the keys of a group; those of messages have the
  // highest bit set.
  static constexpr uint64_t kFirstNamed = uint64_t{1} << 62;
  // True for a call without a name: its key counts the group's calls before it, with a few gaps.
  static bool is_counted(uint64_t key) { return key < kFirstNamed; }

  // Calls whose late frames are still compared. A key that lies this far below a launched one is
  // forgotten (group/numbers.py keeps calls closer together than that).
  static constexpr size_t kKept = 4096;

  // A call was launched under `key`: note how far keys have come.
  void launched(uint64_t key);
  struct Past {
    std::shared_ptr<const Plan> plan;
    Subject subject = 0;
    std::string what() const { return plan->descriptor + words_for(subject); }
  };
  void remember(uint64_t key, std::shared_ptr<const Plan> plan, Subject subject = 0);

  Past past(uint64_t key) const;  // without a plan if unknown or forgotten
  // True if a call under this key finished so long ago that it is forgotten.
  bool is_forgotten(uint64_t key) const;
  const std::pmr::deque<uint64_t>& keys() const { return order_; }  // the oldest first

 private:
  // In few blocks. A block for each call would lie among the program's own memory until 4096 calls
  // later: the heap cannot join the freed tensors around it, so it grows by a tensor in each call.
  std::pmr::unsynchronized_pool_resource memory_;
  std::pmr::unordered_map<uint64_t, Past> past_{&memory_};
  std::pmr::deque<uint64_t> order_{&memory_};
  uint64_t last_counted_ = 0;  // the highest key of a call without a name
  size_t n_chunks_ = 0;
};

}  // namespace shoal
