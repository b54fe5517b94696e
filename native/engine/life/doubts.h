// Two ranks that lose the way to each other ask a third before one of them is given up.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "engine/life/losses.h"
#include "engine/life/peers.h"

namespace shoal {

// What a rank answers that is asked about another; Header::count of an `answer`.
enum class Hears : uint32_t { kNothing = 0, kIt = 1, kHasLeft = 2 };
inline constexpr uint32_t kMostHears = 2;

// A rank whose link with X is gone asks a rank that has one with both: "do you hear X?". That one
// asks X itself, and says yes once X has answered; no, if it has lost X too, or loses it now. Yes
// means that only the way between the two is cut; no means that X is dead. If the rank that was
// asked is lost itself, the next is asked; if there is none, X counts as dead.
//
// Threads: under the channel's lock.
class Doubts {
 public:
  class Voice {
   public:
    virtual void ask(int peer, int about) = 0;
    virtual void answer(int peer, int about, Hears what) = 0;
    // Ends the doubt, by forget().
    virtual void conclude(Loss loss) = 0;
    virtual bool is_far(int peer) const = 0;  // on another host
    // A connection has to be made before it can answer. Until when it has time to, then.
    virtual std::optional<int64_t> first_answer_by(int peer) const = 0;
    virtual std::string who(int peer) const = 0;

   protected:
    ~Voice() = default;
  };

  Doubts(int rank, const Peers& peers, Voice& voice) : rank_(rank), peers_(peers), voice_(voice) {}

  // This rank does not hear `peer` any more, whose state says so. Who knows nothing at `until` will
  // not answer.
  void begin(int peer, const std::string& why, int64_t until);
  // It is heard again, or parted with.
  void forget(int peer);
  // Somebody has asked this rank about it.
  bool is_asked_about(int peer) const;
  void left(int peer);
  void on_ask(int asker, int about);
  void on_answer(int from, int about, Hears what);
  // Goes on where the rank that was asked is gone, and where time is up.
  void settle(int64_t now);
  // This process was stopped: nobody had time to answer.
  void wait_until(int64_t until);

 private:
  struct Doubt {
    int peer, asked;
    std::string why;
    int64_t until;
  };
  struct Question {
    int asker, about;
    int64_t until;  // when the other counts as not heard; INT64_MAX: when its link says so
  };

  int third(int peer) const;
  void condemn(int peer);
  void answer_all(int about, Hears what);

  const int rank_;
  const Peers& peers_;
  Voice& voice_;
  std::vector<Doubt> doubts_;        // of this rank; at most one for each peer
  std::vector<Question> questions_;  // to this rank; at most one for each pair
};

}  // namespace shoal
