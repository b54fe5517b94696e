// Whom the parts of an engine tell what went wrong, and who decides what that ends.
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
  virtual std::string who(int peer) const = 0;  // in words

  // The link with a peer ends: after the current frame or step, never inside it.
  virtual void protocol_error(int peer, const std::string& what) = 0;
  // The same before any other step runs: the peer has given this rank up.
  virtual void evicted_us(int peer, const std::string& why) = 0;
  // At once. `tell`: the other members too.
  virtual void abort_group(Group& group, const Error& why, bool tell) = 0;

  // A peer has called something else under this key; it says what.
  virtual void disagree(Call& call, int peer) = 0;
  virtual void on_disagree(const Call& mine, int peer, std::span<std::byte> payload) = 0;
  // Two members of a call (group ranks) count different bytes between them.
  virtual void lengths_differ(Call& call, int from, int to, uint64_t sent, uint64_t received) = 0;

  // Why a group starts no more calls; empty if it does.
  virtual Error ended(const Group& group) const = 0;
  // A call is in flight now: its group ends if it waits for somebody who has left.
  virtual void launched(Call& call) = 0;

 protected:
  ~Judge() = default;
};

}  // namespace shoal
