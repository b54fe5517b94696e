// Memory of calls that have failed, which links have yet to let go of.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/collective.h"
#include "engine/links.h"

namespace shoal {

// Threads: under the mesh's lock.
class Releases {
 public:
  using Calls = std::vector<std::shared_ptr<Collective>>;

  explicit Releases(Links& links) : links_(links) {}

  // Asks the links with all peers of a call for its memory. Where memory runs out in the middle, it
  // is asked for once more; each answer counts for the question it is of.
  void ask(Collective& call);
  // A link has let go. The call whose memory that was; null: of none that waits for it.
  std::shared_ptr<Collective> released(uint64_t token);
  // The link with a peer is broken or closed, and so has let go of everything. The calls whose
  // memory that was, one for each question.
  Calls drop_peer(int peer);
  void clear() { asked_.clear(); }

 private:
  struct Asked {
    std::shared_ptr<Collective> call;
    int peer;
  };

  void ask(Collective& call, int peer, const std::byte* from, size_t n_bytes);

  Links& links_;
  std::unordered_map<uint64_t, Asked> asked_;  // by token
};

}  // namespace shoal
