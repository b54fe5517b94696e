// The slots of this process's arena: pieces of shared memory that each hold one segment on its way
// to peers of the same host.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "base/error.h"
#include "transport/link.h"

namespace shoal {

// A slot may be offered to several peers (a multicast); it is free when all have taken it. Each
// peer may hold `quota` slots, and there are quota * peers of them, so a slow reader never starves
// another.
//
// A peer that was given up while it was stopped may still read its slots after they were reused. So
// each slot has a stamp in shared memory, which changes before the slot's contents do. An offer
// names the stamp, and the reader checks after reading that it has not changed.
//
// Threads: under the channel's lock.
class Slots {
 public:
  static constexpr size_t kSlotBytes = 128u << 10;
  static constexpr uint32_t kNone = ~0u;

  Slots() = default;
  // `stamps`: one per slot, for peers to read. `reserve` gives a slot its memory; it is called
  // before the slot is first taken.
  Slots(std::byte* base, std::atomic<uint64_t>* stamps, uint32_t n_slots, uint32_t quota,
        int n_peers, std::function<Error(uint32_t slot)> reserve = {});

  uint32_t free_for(int peer) const { return quota_ - held_by_[peer]; }
  // Take a free slot: there is one while any peer may hold one more. Fails only if memory runs out.
  Error take(uint32_t& slot_out);
  void lend(uint32_t slot, int peer);
  // False if `peer` does not hold `slot`: it broke the protocol.
  bool give_back(uint32_t slot, int peer);
  void drop_peer(int peer);  // everything it held counts as taken

  std::byte* data(uint32_t slot) const { return base_ + slot * kSlotBytes; }
  // Changes whenever take() hands the slot out: while a lent slot's stamp is the same, so are its
  // contents.
  uint64_t stamp(uint32_t slot) const { return stamps_[slot]; }
  bool is_lent(uint32_t slot) const { return !holders_[slot].empty(); }

  // Read `slot`, as a peer. kStale: its stamp did not stay `offered` throughout.
  static Moved read(const std::byte* slot, const std::atomic<uint64_t>& stamp, uint64_t offered,
                    const Into& into);

 private:
  std::byte* base_ = nullptr;
  std::atomic<uint64_t>* shown_stamps_ = nullptr;  // never read here: peers can write there too
  uint32_t quota_ = 0;
  std::function<Error(uint32_t)> reserve_;
  std::vector<std::vector<int>> holders_;  // by slot
  std::vector<uint64_t> stamps_;           // by slot
  std::vector<uint32_t> held_by_;          // by peer
  std::vector<uint32_t> free_;
};

}  // namespace shoal
