// One honest rank against a liar: rank 0 runs the engine, the test writes the frames of rank 1 by
// hand, and rank 2 is silent.
#pragma once

#include "test/check.h"
#include "test/faults.h"

namespace shoal::test {

// A far end that accepts every frame.
class Silent final : public FrameSink {
 public:
  std::span<std::byte> receive_buffer(int, const Header& header) override {
    receive_buffer_.resize(header.length);
    return receive_buffer_;
  }
  void arrived(int, const Header& header, std::span<std::byte>) override {
    if (header.type == FrameType::kGrant) n_grants++;
    if (header.type == FrameType::kOffer && (header.flags & kInSlot) != 0) n_slots++;
  }
  void sent(int, uint64_t) override {}
  void spoiled(int, uint64_t) override {}
  void moved(int, uint64_t, Moved) override {}
  void released(int, uint64_t) override {}
  void broken(int, const Error&) override {}

  int n_grants = 0, n_slots = 0;

 private:
  Bytes receive_buffer_;
};

// Rank 0 has posted a sharded all-reduce of three chunks of 20 segments. Its memory is overwritten
// and freed as soon as the call is over, as a caller may do.
struct Duel {
  explicit Duel(bool shares_memory = false)
      : net(3, options_for(shares_memory)), slots(new std::byte[4 * Slots::kSlotBytes]) {
    for (const int peer : {1, 2}) {
      engine.set_link(peer, net.link(0, peer), 0);
      ends[peer] = net.link(peer, 0);
    }
    net.set_arena(0, slots.get(), stamps);
    net.set_arena(1, slots.get(), stamps);
    engine.set_slots(Slots(slots.get(), stamps.data(), 4, 2, 3));
    engine.hooks.on_finished = [this](Call& ended) { free(ended.key); };
    engine.add_group(8, {0, 2});
    Job first;
    first.kind = Kind::kShardedAllReduce;
    first.n_elems = 3 * 20 * 16;
    first.key = 5;
    post(engine.add_group(7, {0, 1, 2}), first);
  }
  ~Duel() { engine.hooks.on_finished = {}; }
  // From now on frame() and `call` refer to this call.
  void post(Group& in, const Job& what) {
    group = &in;
    job = what;
    const auto size = static_cast<int>(in.members.size());
    plan = plan_of(job, 0, size);
    const Bytes input = input_of(job, 0, size);
    auto& memory =
        lent[job.key] = {std::unique_ptr<std::byte[]>(new std::byte[input.size()]), input.size()};
    std::memcpy(memory.first.get(), input.data(), input.size());
    call = engine.post(in, Posting{plan, job.key, {{memory.first.get()}}, INT64_MAX});
    settle();
  }
  void free(uint64_t key) {
    if (const auto found = lent.find(key); found != lent.end()) {
      std::fill_n(found->second.first.get(), found->second.second, std::byte{0xee});
      lent.erase(found);
    }
  }
  static FakeNet::Options options_for(bool shares_memory) {
    FakeNet::Options options;
    options.shares_memory = shares_memory;
    options.max_inline = 256;
    return options;
  }

  Frame frame(FrameType type, uint32_t flow = 0, uint32_t segment = 0, uint32_t count = 0) const {
    Frame made;
    made.header.type = type;
    made.header.group = group->id;
    made.header.key = job.key;
    made.header.descriptor = plan->descriptor_hash;
    made.header.flow = flow;
    made.header.segment = segment;
    made.header.count = count;
    return made;
  }
  void send(Frame made, const Bytes& payload = {}) {
    if (!payload.empty()) {
      made.payload = payload.data();
      made.header.length = static_cast<uint32_t>(payload.size());
    }
    ends[1]->send(made);
    ends[1]->flush(sink);
    settle();
  }
  void settle() {
    for (int n = 0; n < 10; ++n) {
      for (const int peer : {1, 2})
        if (engine.link(peer) != nullptr) engine.link(peer)->pump(engine);
      engine.progress();
      for (const int peer : {1, 2})
        if (reads) ends[peer]->pump(sink);
    }
  }
  // The link with rank 1 is gone, for this reason; everything else is unchanged.
  void check_ended(const std::string& why) {
    CHECK(engine.state_of(1) == Engine::PeerState::kLost);
    CHECK(engine.state_of(2) == Engine::PeerState::kAlive);
    CHECK_EQ(call->error.peer, 1);
    if (!has(call->error.text, why)) fail(__FILE__, __LINE__, call->error.text + " lacks " + why);
  }

  FakeNet net;
  std::unique_ptr<std::byte[]> slots;  // of rank 0; rank 1 offers them as its own
  std::vector<std::atomic<uint64_t>> stamps = std::vector<std::atomic<uint64_t>>(4);
  Engine engine{0, {World::name(0), World::name(1), World::name(2)}, {}};
  Silent sink;
  std::unique_ptr<Link> ends[3];
  Group* group = nullptr;
  Job job;
  std::shared_ptr<const Plan> plan;
  std::map<uint64_t, std::pair<std::unique_ptr<std::byte[]>, size_t>> lent;  // by the call's key
  std::shared_ptr<Call> call;
  bool reads = true;  // the far ends accept frames
};

inline Frame with_place(Frame frame, const Place& place) {
  frame.carry(place);
  return frame;
}

}  // namespace shoal::test
