// Frames of calls that this rank has in flight: each goes to the object that speaks its protocol.
#pragma once

#include <span>

#include "engine/life/judge.h"
#include "engine/segments/commits.h"
#include "engine/segments/post_notices.h"
#include "engine/segments/ways.h"

namespace shoal {

// Threads: under the channel's lock.
class CallFrames {
 public:
  CallFrames(Steps& steps, Ways& ways, Commits& commits, PostNotices& post_notices, Judge& judge)
      : steps_(steps), ways_(ways), commits_(commits), post_notices_(post_notices), judge_(judge) {}

  // The call may be over afterwards.
  void arrived(Call& call, int peer, const Header& header, std::span<std::byte> payload);

  // Whether the blocks between this rank and a peer are as long for both; ends the group if not.
  bool same_lengths(Call& call, int from, std::span<const std::byte> payload);

 private:
  void on_data(Call& call, uint32_t at, const Header& header, std::span<std::byte> payload);

  Steps& steps_;
  Ways& ways_;
  Commits& commits_;
  PostNotices& post_notices_;
  Judge& judge_;
};

}  // namespace shoal
