// Which transports there are, and how a peer gets a link by one of them. The engine knows links
// (link.h) and no kind of them; another transport is its own files and a line in transport.cc.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/mac.h"
#include "transport/arena.h"
#include "transport/link.h"
#include "transport/path_link.h"

namespace shoal {

// An authenticated peer. Descriptors pass to its link.
struct PeerSockets {
  int rank = -1;
  // To another host: connections, each a path, where the transport knows several.
  std::vector<int> fds;
  bool is_local = false;  // it has entered the memory of this host
};

// What is the same for all links of a rank.
struct Site {
  int rank;
  uint64_t epoch;
  Bytes job_key;                 // of the caller
  Arena& arena;                  // of this process; outlives the links
  const std::vector<int> local;  // the ranks of this host, ascending, this one included
  int channel;                   // which of a mesh's it is for
  PathSource* paths;             // makes lost paths anew; null: nobody does. Outlives the links
};

struct Transport {
  const char* name;
  bool (*reaches)(const PeerSockets& peer);
  // Takes the descriptors, also on an error; `out` closes them.
  Error (*connect)(const Site& site, const PeerSockets& peer, std::unique_ptr<Link>& out);
};

// In the order in which they are asked.
const std::vector<Transport>& transports();

// The link to a peer by the first transport that reaches it.
Error connect(const Site& site, const PeerSockets& peer, std::unique_ptr<Link>& out);

}  // namespace shoal
