// A call that is cut over several channels: what its lanes share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>

#include "base/error.h"

namespace shoal {

// Threads: any. Its lock is taken under a channel's, and no other is taken under it.
class Lanes {
 public:
  explicit Lanes(uint32_t n) : left_((1u << n) - 1) {}  // at most ProgressThread::kMost

  // One has ended: nothing of its channel touches the call's memory any more. To say it again does
  // nothing. True for the last: the call has ended with it.
  bool end(uint32_t lane, const Error& error);
  bool have_ended() const { return left_.load(std::memory_order_acquire) == 0; }
  // The first that any of them met, once they have ended.
  const Error& error() const { return error_; }

  // The same memory for all, each of which uses its own segments of it; it lives as long as one of
  // them holds it. Null where there is none.
  std::shared_ptr<std::byte[]> scratch(uint64_t n_bytes);

 private:
  std::atomic<uint32_t> left_;  // a bit for each
  std::mutex mutex_;
  Error error_;
  std::weak_ptr<std::byte[]> scratch_;
};

// One of them.
struct Lane {
  uint32_t index = 0;
  uint64_t serial = 0;        // of the call, as the first channel counts them; 0: this one counts
  std::shared_ptr<Lanes> of;  // null: the call is not cut
};

// Uncleared memory; null where there is none.
std::shared_ptr<std::byte[]> uncleared(uint64_t n_bytes);

}  // namespace shoal
