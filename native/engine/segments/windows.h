// The scratch of served calls, taken by segment: a server holds no whole shard, but windows that
// move over it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "engine/segments/call.h"
#include "engine/segments/staging.h"
#include "engine/segments/steps.h"

namespace shoal {

// A segment of scratch is taken before it may be sent into, and given back when its last step is
// done, which is when all workers have acknowledged the result. Segments are taken call by call,
// and within a call in the order in which workers send (turns.h): all chunks advance in proportion.
//
// All windows together have a ceiling. A call that holds none may take one segment beyond it: all
// workers can always send what the first segment of a call needs, so no set of calls can deadlock.
//
// If this rank receives several times as much as any other rank sends, its link is the bottleneck.
// Senders that keep their own links busy would overflow the switch in front of it: with 16 workers
// and one server 3 % of the packets were lost. So the bytes granted for such calls and not yet
// received are bounded too; each call may have one segment beyond that bound.
//
// Threads: under the channel's lock.
class Windows {
 public:
  Windows(Staging& staging, Steps& steps) : staging_(staging), steps_(steps) {}

  // Calls are about to be served: set aside half of the staging for them, or what is left of it.
  void open(size_t staging_bytes);
  // Bound the bytes on their way here for calls with incast.
  void bound(size_t n_bytes) { most_inbound_ = n_bytes; }
  // Add a new call, before any of its steps may run.
  void begin(Call& call);
  // Give back segments that the call's steps no longer need, and let waiting calls continue.
  void settle(Call& call);
  // Give back all segments of a finished call, whose memory no link uses any more.
  void give_back(Call& call);
  // Give room to waiting calls after one has ended. Must not be called while a call is ending.
  void pass_on();

  size_t n_bytes() const { return n_bytes_; }  // held now
  uint64_t n_inbound() const { return n_inbound_; }

 private:
  void grant(Call& call);
  static bool is_incast(const Call& call);
  static Window* next_of(Call& call);
  bool take_in(Call& call);
  bool take_next(Call& call);

  Staging& staging_;
  Steps& steps_;
  std::deque<std::weak_ptr<Call>> calls_;  // calls with segments left to take, the oldest first
  size_t ceiling_ = 0, n_bytes_ = 0;
  uint64_t most_inbound_ = 32u << 20, n_inbound_ = 0;
  bool is_open_ = false;
};

}  // namespace shoal
