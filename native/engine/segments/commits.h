// How calls of workers and servers end: on no worker before all of them hold every result.
#pragma once

#include "engine/life/judge.h"
#include "engine/segments/call.h"
#include "engine/segments/links.h"

namespace shoal {

// A worker that holds all that a server sends it says so; a server that has heard all its workers
// tells them; a worker's call is over when all its servers have told. So if the call has succeeded
// on one worker, every worker holds every result, whoever dies next (docs/decisions/0025).
//
//   worker                               server
//     commit       ------------------->    (when the last segment lies in place)
//                  <-------------------  commit, once all workers have sent theirs
//
// Threads: under the channel's lock.
class Commits {
 public:
  Commits(Links& links, Judge& judge) : links_(links), judge_(judge) {}

  // A new call: what is to be heard.
  static void expect(Call& call);
  // Tells servers what has been found since the last time. The call may be through afterwards.
  void tell(Call& call);
  // A commit has come, from this rank of the group.
  void heard(Call& call, int from);

 private:
  static bool is_possible(const Call& call, int from);
  void send(Call& call, int to);

  Links& links_;
  Judge& judge_;
};

}  // namespace shoal
