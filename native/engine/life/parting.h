// How this rank parts with others: broken links, silence, doubts, and what a loss ends.
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

// What breaks a link is noted at once, and dealt with after the current frame or step, never inside
// it: then the peer's state changes, its link is removed, a third is asked or the news passed on,
// and the judge ends groups.
//
// Owns what is noted, this rank's doubts, the losses that it knows of, and when it heard whom.
// Threads: under the channel's lock. `now`: of the last tick.
class Parting final : private Doubts::Voice {
 public:
  struct Options {
    int64_t heartbeat_ns = 500'000'000;
    int64_t suspect_ns = 2'000'000'000;
    int64_t dead_ns = 5'000'000'000;

    // Silence that makes a peer dead; how often to speak, and what was a stop of our own, with it.
    void take_for_dead_after(int64_t ns) {
      dead_ns = ns;
      heartbeat_ns = std::min(heartbeat_ns, ns / 4);
      suspect_ns = std::min(suspect_ns, ns * 2 / 5);
    }
  };

  Parting(int rank, const Options& options, Links& links, Ways& ways, Calls& calls, Groups& groups,
          Peers& peers, News& news, Judge& judge, FrameSink& sink, const int64_t& now);

  // Noted:
  void broken(int peer, const Error& error);          // its link says so
  void give_up(int peer, const std::string& why);     // this rank has reason to
  void evicted_us(int peer, const std::string& why);  // it has given this rank up
  void left(int peer);                                // it has said goodbye
  // Who was given up must not use what it finds: that is dealt with first.
  bool is_evicted() const {
    return !breaking_.empty() && breaking_.front().how == Breaking::kEvictedUs;
  }
  // Deals with what was noted. `only_evictions`: the rest has to wait.
  void settle(bool only_evictions);

  // A peer says that a rank is lost. True if that is new, and follow() is to be called in the end.
  bool learn(const Loss& loss, int from);
  // Ends what a loss ends, and passes it on. `from`: who told this rank.
  void follow(const Loss& loss, const std::vector<int>& from);
  // A group is made, perhaps of ranks that are not there any more.
  void made(Group& group);

  void on_asking(int peer, const Header& header);
  // Says what a frame of the peer calls for.
  void reply(int peer, const Frame& frame);

  // A frame has come, or what counts as one came at `when`.
  void heard(int peer);
  void heard_from(int peer, int64_t when);
  int64_t heard_ns(size_t peer) const { return heard_ns_[peer]; }
  // Speaks to all peers, and looks who is silent. `last_ns`: when it did so before.
  void listen(int64_t last_ns);

 private:
  struct Breaking {
    int peer;
    enum How : uint8_t {
      kGoodbye,
      kNoPath,     // the way to the peer is gone
      kUnmet,      // there never was one, and nobody listens where it did
      kParted,     // this rank has reason to give it up
      kEvictedUs,  // it has given this rank up: no step runs before
    } how;
    Loss loss;
  };

  void settle(const Breaking& broken);
  void miss(int peer, const std::string& why);
  void departed(int peer, const std::string& how);
  void part(int peer, Loss loss, bool tell);
  void end_link(int peer, const Loss& loss);
  void end_groups_of(const Loss& loss);
  bool is_awaited(int peer) const;
  bool is_unlinked(int peer) const;

  int64_t patience() const;
  void listen_to(int peer);
  void end_silence(int peer);
  void excuse_silence();

  // Doubts::Voice
  void ask(int peer, int about) override;
  void answer(int peer, int about, Hears what) override;
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
  std::vector<int64_t> heard_ns_;  // by peer
};

}  // namespace shoal
