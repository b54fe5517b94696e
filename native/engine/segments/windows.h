// Scratch of served calls, by segment: a server holds no shards, but windows that move over them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>

#include "engine/segments/call.h"
#include "engine/segments/staging.h"
#include "engine/segments/steps.h"

namespace shoal {

// A segment of scratch is taken before anything may be sent into it, and given back when the last
// step that touches it is through with it: when all have acknowledged the result. Segments are
// taken in the order of calls, and in each in that in which workers send (turns.h): all chunks are
// as far, in proportion.
//
// All of them have a ceiling. A call that holds none may have one beyond it: all workers send what
// the first segment of a call needs, whatever else they are allowed, so that no set of calls can
// block each other, and each gets on.
//
// Where several times as much comes to this rank as any other sends, its link is what all wait
// for. Senders that each keep their own link busy would fill the switch in front of it, which loses
// what is too much: 3 % of what 16 workers sent one server. So what may be sent into the windows of
// such calls and is not here is bounded too; a call may have one segment beyond that.
//
// Threads: under the channel's lock.
class Windows {
 public:
  Windows(Staging& staging, Steps& steps) : staging_(staging), steps_(steps) {}

  // Calls are about to be served: sets aside half of all staging for them, or what is left of that.
  void open(size_t staging_bytes);
  // What may be on its way here of calls of which more comes than anybody sends.
  void bound(size_t n_bytes) { most_inbound_ = n_bytes; }
  // A new call, all of whose steps are known and none of which may go on yet.
  void begin(Call& call);
  // Gives back what steps of the call are through with, and lets calls go on that waited for room.
  void settle(Call& call);
  // The call is finished: no link reads or writes there any more.
  void give_back(Call& call);
  // To calls that wait for room, now that some has ended. NOT while it ends.
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
  std::deque<std::weak_ptr<Call>> calls_;  // that have yet to take some, the oldest first
  size_t ceiling_ = 0, n_bytes_ = 0;
  uint64_t most_inbound_ = 32u << 20, n_inbound_ = 0;
  bool is_open_ = false;
};

}  // namespace shoal
