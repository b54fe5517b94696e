// Before a rank declares a peer dead because their link broke, it asks a third rank.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/life/losses.h"
#include "engine/life/peers.h"

namespace shoal {

// The answer to "is that rank alive?"; Header::count of an `answer` frame.
enum class Answer : uint32_t { kUnreachable = 0, kAlive = 1, kHasLeft = 2 };
inline constexpr uint32_t kLastAnswer = 2;

// A rank that lost its link to X asks a third rank, linked to both: "is X alive?". The third rank
// pings X. It answers yes once X has replied, and no if its own link to X is lost. Yes means that
// only the network between the two is cut; no means that X is dead. If the third rank is lost
// itself, the next one is asked; with no rank left to ask, X counts as dead.
//
// Threads: under the channel's lock.
class Doubts {
 public:
  class Callbacks {
   public:
    virtual void ask(int peer, int about) = 0;
    virtual void answer(int peer, int about, Answer what) = 0;
    // Ends the doubt, by forget().
    virtual void conclude(Loss loss) = 0;
    virtual bool is_far(int peer) const = 0;  // on another host
    // The deadline for `peer`'s first answer if a connection must be made before it can reply.
    virtual std::optional<int64_t> first_answer_by(int peer) const = 0;
    virtual std::string who(int peer) const = 0;

   protected:
    ~Callbacks() = default;
  };

  Doubts(int rank, const Peers& peers, Callbacks& callbacks)
      : rank_(rank), peers_(peers), callbacks_(callbacks) {}

  // Start to ask about `peer`, whose state is kSilent or kCut. A third rank that has not answered
  // at `until` counts as having no answer.
  void begin(int peer, const std::string& why, int64_t until);
  // `peer` has sent a frame again, or has been given up: drop the doubt and its questions.
  void forget(int peer);
  // True if another rank has asked this one about `peer`.
  bool is_asked_about(int peer) const;
  void left(int peer);
  void on_ask(int asker, int about);
  void on_answer(int from, int about, Answer what);
  // Ask the next rank where the one asked is lost, and conclude doubts whose time is up.
  void settle(int64_t now);
  // This process was stopped for a while, so extend all deadlines: no rank had time to answer.
  void wait_until(int64_t until);

 private:
  struct Doubt {
    int peer, asked;
    std::string why;
    int64_t until;
  };
  struct Question {
    int asker, about;
    int64_t until;  // when `about` counts as unreachable; INT64_MAX: once its link is lost
  };

  int third(int peer) const;
  void condemn(int peer);
  void answer_all(int about, Answer what);

  const int rank_;
  const Peers& peers_;
  Callbacks& callbacks_;
  std::vector<Doubt> doubts_;        // of this rank; at most one for each peer
  std::vector<Question> questions_;  // to this rank; at most one for each pair
};

}  // namespace shoal
