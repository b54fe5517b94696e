// What a receiver allows the sender of a flow: segments, and perhaps a place and an implicit clear
// to send.
//
// Between hosts that is ahead of need, backed by reserved staging; in shared memory only what a
// step is starving for, since slots let the sender run ahead by itself. A receive whose only
// predecessor is a send to the same peer is granted at once with an implicit clear to send: "when
// you have consumed that send of mine".
#pragma once

#include "engine/segments/granted_way.h"
#include "engine/segments/put_way.h"

namespace shoal {

// Threads: under the channel's lock.
class Grants {
 public:
  Grants(Links& links, Steps& steps, Judge& judge, GrantedWay& granted, PutWay& put)
      : links_(links), steps_(steps), judge_(judge), granted_(granted), put_(put) {}

  // Receiver: tells the sender how far it may go, where that is more than it knows.
  void grant(Call& call, uint32_t at);
  // Sender: the receiver, of this rank in the group, says so.
  void on_grant(Call& call, int from, const Header& header, const Place& place);

 private:
  Links& links_;
  Steps& steps_;
  Judge& judge_;
  GrantedWay& granted_;
  PutWay& put_;
};

}  // namespace shoal
