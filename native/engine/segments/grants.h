// A receiver grants the sender of a flow segments, and perhaps a place to put them and an implicit
// clear to send.
//
// Between hosts, grants run ahead of need, backed by reserved staging. In shared memory only a
// starving step grants, since slots let the sender run ahead by itself. A receive whose only
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

  // Receiver: send a grant if the sender may go further than the last one allowed.
  void grant(Call& call, uint32_t at);
  // Sender: a grant has come from group rank `from`.
  void on_grant(Call& call, int from, const Header& header, const Place& place);

 private:
  Links& links_;
  Steps& steps_;
  Judge& judge_;
  GrantedWay& granted_;
  PutWay& put_;
};

}  // namespace shoal
