// The list of transports, and the choice of one for each peer. The engine knows only links
// (link.h); a new transport is its own files and a line in transport.cc.
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

// The place of a peer. A link to another host starts unlinked (link.h).
struct PeerPlace {
  int rank = -1;
  bool is_local = false;  // it has entered the memory of this host
  size_t n_paths = 1;     // to another host, of one channel: at most Header::kMaxPaths
};

// The arguments common to all links of a rank.
struct Site {
  int rank;
  uint64_t epoch;
  Bytes job_key;                 // of the caller
  Arena& arena;                  // of this process; outlives the links
  const std::vector<int> local;  // the ranks of this host, ascending, this one included
  int channel;                   // which of a mesh's it is for
  PathSource* paths;             // to other hosts, null if there are none; outlives the links
};

struct Transport {
  const char* name;
  bool (*reaches)(const PeerPlace& peer);
  Error (*connect)(const Site& site, const PeerPlace& peer, std::unique_ptr<Link>& out);
};

// All transports, in the order in which they are tried.
const std::vector<Transport>& transports();

// Make the link to a peer by the first transport that reaches it.
Error connect(const Site& site, const PeerPlace& peer, std::unique_ptr<Link>& out);

}  // namespace shoal
