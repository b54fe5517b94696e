// The commit of a served call: no worker's call succeeds before every worker holds every result.
#pragma once

#include "engine/life/judge.h"
#include "engine/segments/call.h"
#include "engine/segments/links.h"

namespace shoal {

// A worker that holds a server's whole result sends it a commit. A server that has the commits of
// all its workers sends each a commit. A worker's call is over when all its servers have sent
// theirs. So if the call has succeeded on one worker, every worker holds every result, even if a
// rank dies next (docs/decisions/0025).
//
//   worker                               server
//     commit       ------------------->    (when the last segment lies in place)
//                  <-------------------  commit, once all workers have sent theirs
//
// Threads: under the channel's lock.
class Commits {
 public:
  Commits(Links& links, Judge& judge) : links_(links), judge_(judge) {}

  // Note which commits a new call needs.
  static void expect(Call& call);
  // Send the commits that have become due. The call may be over afterwards.
  void send_due(Call& call);
  // A commit arrived from group rank `from`.
  void on_commit(Call& call, int from);

 private:
  static bool is_possible(const Call& call, int from);
  void send(Call& call, int to);

  Links& links_;
  Judge& judge_;
};

}  // namespace shoal
