// How a group ends before its time: disagreement, abort, deadlines, and what others say has ended.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "engine/life/judge.h"
#include "engine/life/news.h"
#include "engine/life/parting.h"
#include "engine/life/peers.h"
#include "engine/segments/calls.h"
#include "engine/segments/groups.h"
#include "engine/segments/hooks.h"
#include "engine/segments/links.h"

namespace shoal {

// The judge of an engine's parts: it finds the words for what went wrong, tells the other members,
// and fails the calls of a group. What others say has ended waits here, for what calls can still do
// with what came before it.
//
// Owns what others said. All parts know it, so it is made before them, and asks nothing of them
// until they are there. Threads: under the channel's lock. `now`: of the last tick.
class Faults final : public Judge {
 public:
  // `names`: of all ranks.
  Faults(int rank, const std::vector<std::string>& names, Links& links, Calls& calls,
         Groups& groups, const Peers& peers, News& news, Parting& parting, const Hooks& hooks,
         FrameSink& sink, const int64_t& now)
      : rank_(rank),
        names_(names),
        links_(links),
        calls_(calls),
        groups_(groups),
        peers_(peers),
        news_(news),
        parting_(parting),
        hooks_(hooks),
        sink_(sink),
        now_(now) {}

  // Judge
  std::string who(int peer) const override { return names_[static_cast<size_t>(peer)]; }
  void protocol_error(int peer, const std::string& what) override;
  void evicted_us(int peer, const std::string& why) override;
  void abort_group(Group& group, const Error& why, bool tell) override;
  void disagree(Call& call, int peer) override;
  void on_disagree(const Call& mine, int peer, std::span<std::byte> payload) override;
  void lengths_differ(Call& call, int from, int to, uint64_t sent, uint64_t received) override;
  Error ended(const Group& group) const override;
  void launched(Call& call) override;

  void timed_out(const Call& call);
  // Somebody here wrote to what was being sent.
  void spoiled(const Call& call, int peer);
  // A group is made, of which others may have said that it has ended.
  void made(Group& group);

  // Frames: another rank tells us that a group has ended, or that a rank is lost.
  void on_abort(int peer, const Header& header, std::span<std::byte> payload);
  void on_lost(int peer, const Header& header, std::span<std::byte> payload);
  // Some of that is not settled.
  bool has_endings() const { return !endings_.empty(); }
  // Settles it one turn after it was said: what came before that word, on other links too, is used
  // first, and a call that it completes ends well.
  void settle_endings();
  // At once: this rank is about to leave.
  void settle_all_endings();

 private:
  // What others said has ended: a group, or all that a loss ends.
  struct Ending {
    uint64_t group;
    Error why;
    std::optional<Loss> loss;
    std::vector<int> from;
    int n_turns;  // that have passed since it was said
  };

  // `from`: who told this rank, and need not be told.
  void end_group(Group& group, const Error& why, bool tell, const std::vector<int>& from);
  void say_unmade(int peer, uint64_t group);
  void settle(const Ending& ending);
  bool is_runnable(const Ending& ending) const;
  std::string called(const Call& call) const;
  static bool concerns(const Ending& ending, const Group& group);

  const int rank_;
  const std::vector<std::string>& names_;
  Links& links_;
  Calls& calls_;
  Groups& groups_;
  const Peers& peers_;
  News& news_;
  Parting& parting_;
  const Hooks& hooks_;
  FrameSink& sink_;
  const int64_t& now_;
  std::vector<Ending> endings_;
};

}  // namespace shoal
