// How a group fails: mismatched calls, aborts, deadlines, and failures that other ranks report.
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

// The engine's `Judge`: it writes the error, notifies the other members, and fails a group's calls.
// A failure that another rank reports waits here for one turn, so that calls can complete with the
// frames that arrived before it.
//
// Owns the reported failures. Every part refers to it, so it is constructed first and calls none of
// them before all exist. Threads: under the channel's lock. `now`: the time of the last tick.
class Faults final : public Judge {
 public:
  // `names`: by mesh rank, as errors show them.
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
  void abort_group(Group& group, const Error& why, bool notify) override;
  void disagree(Call& call, int peer) override;
  void on_disagree(const Call& mine, int peer, std::span<std::byte> payload) override;
  void lengths_differ(Call& call, int from, int to, uint64_t sent, uint64_t received) override;
  Error ended(const Group& group) const override;
  void launched(Call& call) override;

  void timed_out(const Call& call);
  // The program wrote to a buffer while it was being sent to `peer`.
  void spoiled(const Call& call, int peer);
  // `group` was created; fail it if another rank has already reported its end.
  void made(Group& group);

  // Frames by which another rank reports that a group has failed, or that a rank is lost.
  void on_abort(int peer, const Header& header, std::span<std::byte> payload);
  void on_lost(int peer, const Header& header, std::span<std::byte> payload);
  // True if reported failures wait to be settled.
  bool has_endings() const { return !endings_.empty(); }
  // Apply each reported failure one turn after it arrived. Frames that arrived before it, on any
  // link, are used first, so a call that they complete succeeds.
  void settle_endings();
  // Apply all reported failures now, because this rank is about to leave.
  void settle_all_endings();

 private:
  // A reported failure: of one group, or of every group that `loss` ends.
  struct Ending {
    uint64_t group;
    Error why;
    std::optional<Loss> loss;
    std::vector<int> from;
    int n_turns;  // since the report arrived
  };

  // `from`: the ranks that reported it, which need no notice.
  void end_group(Group& group, const Error& why, bool notify, const std::vector<int>& from);
  void send_unmade(int peer, uint64_t group);
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
