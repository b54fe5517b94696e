// How this rank gives peers up: broken links, silence, doubts, and the groups that a loss ends.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/life/doubts.h"
#include "engine/life/judge.h"
#include "engine/life/losses.h"
#include "engine/life/news.h"
#include "engine/life/peers.h"
#include "engine/segments/calls.h"
#include "engine/segments/groups.h"
#include "engine/segments/links.h"
#include "engine/segments/ways.h"

namespace shoal {

// A broken link is noted at once and settled after the current frame or step, never within. To
// settle it, this rank changes the peer's state, removes the link, asks a third rank or forwards
// the news, and the judge fails groups.
//
// Owns the notes, this rank's doubts, the losses known to it, and the time of each peer's last
// frame. Threads: under the channel's lock. `now`: the time of the last tick.
class Parting final : private Doubts::Callbacks {
 public:
  struct Options {
    int64_t heartbeat_ns = 500'000'000;
    int64_t suspect_ns = 2'000'000'000;
    int64_t dead_ns = 5'000'000'000;
    // For a peer whose host confirms what it is sent: its process may only wait for a core.
    int64_t stalled_ns = 5'000'000'000;

    // A peer silent for `ns` is dead. Shortens all other times to match.
    void take_for_dead_after(int64_t ns) {
      dead_ns = ns;
      stalled_ns = std::max(ns, std::min(ns, stalled_ns * 2 / 5) * 5 / 2);
      heartbeat_ns = std::min(heartbeat_ns, ns / 4);
      suspect_ns = std::min(suspect_ns, ns * 2 / 5);
    }
  };

  Parting(int rank, const Options& options, Links& links, Ways& ways, Calls& calls, Groups& groups,
          Peers& peers, News& news, Judge& judge, FrameSink& sink, const int64_t& now);

  // Notes:
  void broken(int peer, const Error& error);          // the link reported an error
  void give_up(int peer, const std::string& why);     // the peer is at fault
  void evicted_us(int peer, const std::string& why);  // the peer gave this rank up
  void left(int peer);                                // the peer sent its goodbye
  // True if this rank was evicted. That is settled first: it must use no more frames.
  bool is_evicted() const {
    return !breaking_.empty() && breaking_.front().how == Breaking::kEvictedUs;
  }
  // Settle the notes. `only_evictions`: leave all others for later.
  void settle(bool only_evictions);

  // Record a loss that `from` reported. True if it is new; then the caller must call follow()
  // later.
  bool learn(const Loss& loss, int from);
  // Fail the groups that a loss ends, and forward it. `from`: the ranks that reported it.
  void follow(const Loss& loss, const std::vector<int>& from);
  // A group was created; fail it if one of its members is lost.
  void made(Group& group);

  void on_asking(int peer, const Header& header);
  // Send the reply that a frame of the peer requires.
  void reply(int peer, const Frame& frame);

  // A frame of the peer arrived, or a sign of life arrived at `when`.
  void mark_alive(int peer);
  void alive_at(int peer, int64_t when);
  int64_t last_alive_ns(size_t peer) const { return last_alive_ns_[peer]; }
  // Send heartbeats, and look for silent peers. `last_ns`: when it was last called.
  void listen(int64_t last_ns);

 private:
  struct Breaking {
    int peer;
    enum How : uint8_t {
      kGoodbye,
      kNoPath,     // the link to the peer broke
      kUnmet,      // there never was a link, and its address refuses connections
      kParted,     // this rank gives the peer up
      kEvictedUs,  // the peer gave this rank up: no step runs before this is settled
    } how;
    Loss loss;
  };

  void settle(const Breaking& broken);
  void miss(int peer, const std::string& why);
  void departed(int peer, const std::string& how);
  void part(int peer, Loss loss, bool notify);
  void end_link(int peer, const Loss& loss);
  void end_groups_of(const Loss& loss);
  bool is_awaited(int peer) const;
  bool is_unlinked(int peer) const;

  int64_t patience() const;
  void listen_to(int peer);
  void end_silence(int peer);
  void excuse_silence(int64_t absent_ns);

  // Doubts::Callbacks
  void ask(int peer, int about) override;
  void answer(int peer, int about, Answer what) override;
  void conclude(Loss loss) override;
  bool is_far(int peer) const override { return links_.is_far(peer); }
  std::optional<int64_t> first_answer_by(int peer) const override;
  std::string who(int peer) const override { return judge_.who(peer); }

  const int rank_;
  const Options options_;
  Links& links_;
  Ways& ways_;
  Calls& calls_;
  Groups& groups_;
  Peers& peers_;
  News& news_;
  Judge& judge_;
  FrameSink& sink_;
  const int64_t& now_;
  std::deque<Breaking> breaking_;
  Losses losses_;
  Doubts doubts_;
  std::vector<int64_t> last_alive_ns_;  // by peer
};

}  // namespace shoal
