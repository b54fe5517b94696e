// The state shared by the lanes of a call that is cut over several channels.
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

  // A lane has ended: its channel no longer touches the call's memory. Idempotent. True for the
  // last lane, with which the call ends.
  bool end(uint32_t lane, const Error& error);
  bool have_ended() const { return left_.load(std::memory_order_acquire) == 0; }
  // The first error of any lane; valid once all have ended.
  const Error& error() const { return error_; }

  // Scratch shared by all lanes, each of which uses its own segments. It lives while a lane holds
  // it. Null if memory runs out.
  std::shared_ptr<std::byte[]> scratch(uint64_t n_bytes);

 private:
  std::atomic<uint32_t> left_;  // a bit for each
  std::mutex mutex_;
  Error error_;
  std::weak_ptr<std::byte[]> scratch_;
};

// One lane of a call.
struct Lane {
  uint32_t index = 0;
  uint64_t serial = 0;        // the call's number on the first channel; 0: this is the first
  std::shared_ptr<Lanes> of;  // null: the call is not cut
};

// Uninitialised memory; null if there is none.
std::shared_ptr<std::byte[]> uncleared(uint64_t n_bytes);

}  // namespace shoal
