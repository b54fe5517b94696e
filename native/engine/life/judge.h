// The interface by which the engine's parts report a fault; the judge decides what it ends.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"

namespace shoal {

struct Call;
struct Group;
struct Plan;

// Threads: under the channel's lock.
class Judge {
 public:
  virtual std::string who(int peer) const = 0;  // as errors name it

  // Drop the link with a peer that broke the protocol: after the current frame or step, never
  // within.
  virtual void protocol_error(int peer, const std::string& what) = 0;
  // The peer has evicted this rank: drop the link before any other step runs.
  virtual void evicted_us(int peer, const std::string& why) = 0;
  // Fail the group now. `notify`: notify the other members.
  virtual void abort_group(Group& group, const Error& why, bool notify) = 0;

  // A peer made a different call under this call's key; `payload` describes it.
  virtual void disagree(Call& call, int peer) = 0;
  virtual void on_disagree(const Call& mine, int peer, std::span<std::byte> payload) = 0;
  // Two members of a call (group ranks) expect a different number of bytes between them.
  virtual void lengths_differ(Call& call, int from, int to, uint64_t sent, uint64_t received) = 0;

  // Why the group accepts no more calls; empty if it accepts them.
  virtual Error ended(const Group& group) const = 0;
  // A call was launched: fail its group if the call needs a member that has left.
  virtual void launched(Call& call) = 0;

 protected:
  ~Judge() = default;
};

}  // namespace shoal
