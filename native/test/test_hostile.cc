// Peers that lie: whatever a frame claims, it ends the link it came by and nothing else. No number
// from a peer is used as a bound or an index (the address sanitizer watches).
#include "test/check.h"
#include "test/duel.h"
#include "test/pool.h"
#include "transport/frame_rules.h"

namespace shoal::test {
namespace {

TEST("an unknown flow or segment of a call ends the link") {
  using enum FrameType;
  for (const auto type : {kData, kGrant, kOffer, kConsumed, kPutComplete, kRequestToSend}) {
    for (const auto& [flow, segment] : {std::pair{2u, 0u}, {~0u, 0u}, {0u, 21u}, {1u, ~0u}}) {
      Duel duel(type != FrameType::kData);
      const bool has_place = type == FrameType::kGrant || type == FrameType::kOffer;
      const size_t n_bytes = type == FrameType::kData ? 64 : has_place ? sizeof(Place) : 0;
      duel.send(duel.frame(type, flow, segment, 1), Bytes(n_bytes));
      duel.check_ended("named flow " + std::to_string(flow) + ", segment " +
                       std::to_string(segment));
    }
  }
}

TEST("data that is repeated, not asked for or of the wrong length ends the link") {
  {
    Duel duel;
    duel.send(duel.frame(FrameType::kData, 1, 1), Bytes(64));  // of a flow that was granted at once
    CHECK(!duel.call->finished);
    duel.send(duel.frame(FrameType::kData, 1, 1), Bytes(64));
    duel.check_ended("sent segment 1 of all_reduce by sharded");
  }
  for (const auto& [segment, n_bytes] : {std::pair{19u, 64u}, {20u, 64u}, {0u, 63u}, {0u, 65u}}) {
    Duel duel;
    duel.send(duel.frame(FrameType::kData, 0, segment), Bytes(n_bytes));
    duel.check_ended("sent segment " + std::to_string(segment));
  }
}

TEST("eager data has a limit, whether the call is posted or not") {
  for (const uint64_t first_key : {uint64_t{5}, uint64_t{100}}) {
    Duel duel;
    Frame eager = duel.frame(FrameType::kData, 0, 0);
    eager.header.flags = kEager;
    eager.header.key = first_key;
    for (int n = 0; n < 5000 && duel.engine.link(1) != nullptr; ++n) {
      eager.header.segment = first_key == 5 ? static_cast<uint32_t>(n) : 0;
      if (first_key != 5) eager.header.key++;
      duel.send(eager, Bytes(first_key == 5 ? 64 : 1000));
    }
    duel.check_ended(first_key == 5 ? "segment 20" : "more than its allowance");
    CHECK(duel.engine.staging().peak() < (2u << 20));
  }
}

TEST("a call that is not posted accepts only announcements and eager data") {
  {
    Duel duel;
    Frame data = duel.frame(FrameType::kData);
    data.header.key = 100;
    duel.send(data, Bytes(64));
    duel.check_ended("sent 64 B for a call that this rank has not posted");
  }
  {
    Duel duel;
    Frame notice = duel.frame(FrameType::kPost);
    for (uint64_t n = 0; n <= 1u << 16 && duel.engine.link(1) != nullptr; ++n) {
      notice.header.group = 1000 + n % 3000;  // groups that no rank has created
      notice.header.key = n;
      duel.ends[1]->send(notice);
      if (n % 1000 == 0) duel.ends[1]->flush(duel.sink), duel.settle();
    }
    duel.ends[1]->flush(duel.sink);
    duel.settle();
    duel.check_ended("is more than 65536 frames ahead");
  }
}

TEST("offers past the end or repeated end the link, and offers of unknown memory end the group") {
  for (const auto& [segment, count] : {std::pair{0u, 0u}, {0u, 21u}, {20u, 1u}, {19u, ~0u}}) {
    Duel duel(true);
    duel.send(with_place(duel.frame(FrameType::kOffer, 0, segment, count), {}));
    duel.check_ended("offered segments that all_reduce");
  }
  for (const auto& [segment, count] : {std::pair{2u, 3u}, {4u, 1u}, {0u, 20u}, {1u, 2u}}) {
    Duel duel(true);
    duel.send(with_place(duel.frame(FrameType::kOffer, 0, 2, 3), {}));
    CHECK(!duel.call->finished);
    duel.send(with_place(duel.frame(FrameType::kOffer, 0, segment, count), {}));
    duel.check_ended("twice");
  }
  // The second flow is stored as soon as our own chunk is sent: nothing else delays it.
  Duel duel(true);
  duel.send(with_place(duel.frame(FrameType::kGrant, 0, 20), {}));
  duel.send(with_place(duel.frame(FrameType::kOffer, 1, 0, 1), {12345, 0, 0}));
  // It looks like a mapping that the kernel refused: the group ends, not the link.
  CHECK(duel.call->error.fault == Fault::kResource);
  CHECK(has(duel.call->error.text, "could not map shared memory of " + World::name(1)));
}

TEST("a segment that arrives in a frame during its get from a slot ends the link") {
  Duel duel(true);
  duel.net.options.moves_late = 1;
  duel.net.options.longest_delay = uint64_t{1} << 40;
  duel.send(with_place(duel.frame(FrameType::kGrant, 0, 20), {}));
  Frame offer = with_place(duel.frame(FrameType::kOffer, 1, 0, 1), {});
  offer.header.flags = kInSlot;
  duel.send(offer);
  CHECK(!duel.call->finished);
  Frame data = duel.frame(FrameType::kData, 1, 0);
  data.header.flags = kEager;
  duel.send(data, Bytes(64));
  duel.check_ended("sent segment 0 of all_reduce by sharded");
}

TEST("an offer in an unknown slot, or of several segments in one slot, ends the link") {
  for (const auto& [slot, count] : {std::pair{4u, 1u}, {~0u, 1u}, {0u, 2u}}) {
    Duel duel(true);
    duel.send(with_place(duel.frame(FrameType::kGrant, 0, 20), {}));
    Frame offer = with_place(duel.frame(FrameType::kOffer, 1, 0, count), {slot, 0, 0});
    offer.header.flags = kInSlot;
    duel.send(offer);
    duel.check_ended("in a slot that it does not have");
  }
}

TEST("a slot without memory ends the group with a reason") {
  Duel duel(true);
  uint32_t n_asked = 0;
  duel.engine.set_slots(Slots(duel.slots.get(), duel.stamps.data(), 4, 2, 3, [&](uint32_t) {
    return ++n_asked == 2 ? Error{Fault::kResource, -1, "no memory"} : Error{};
  }));
  duel.send(with_place(duel.frame(FrameType::kGrant, 0, 1), {}));
  CHECK(!duel.call->finished);
  duel.send(with_place(duel.frame(FrameType::kGrant, 0, 2), {}));
  CHECK(duel.call->error.fault == Fault::kResource);
  CHECK(has(duel.call->error.text, World::name(0) + " could not send: no memory"));
}

TEST("giving back slots that are not held ends the link") {
  for (const uint32_t slot : {0u, 1u, 3u, 4u, ~0u}) {
    Duel duel(true);
    Frame consumed = duel.frame(FrameType::kConsumed, 0, 0, slot);
    consumed.header.flags = kInSlot;
    duel.send(consumed);
    duel.check_ended("gave back a slot it does not hold");
  }
  Duel duel(true);
  duel.send(with_place(duel.frame(FrameType::kGrant, 0, 1), {}));
  CHECK(duel.sink.n_slots > 0);  // now rank 1 holds slot 0, once
  Frame consumed = duel.frame(FrameType::kConsumed, 0, 0, 0);
  consumed.header.flags = kInSlot;
  duel.send(consumed);
  CHECK(!duel.call->finished);
  for (int n = 0; n < 30; ++n) duel.send(consumed);
  duel.check_ended("gave back a slot it does not hold");
}

TEST("a grant with an impossible implicit clear to send, or of unknown memory, does no harm") {
  {
    Duel duel;
    duel.send(with_place(duel.frame(FrameType::kGrant, 0, 1), {0, 2, 0}));
    duel.check_ended("waits for a flow of all_reduce");
  }
  for (const uint64_t offset : {uint64_t{0}, ~uint64_t{63}, ~uint64_t{0}}) {
    Duel duel(true);
    duel.send(with_place(duel.frame(FrameType::kGrant, 0, 20), {99, Place::kNoFlow, offset}));
    CHECK(!duel.call->finished);
    CHECK(duel.sink.n_slots > 0);  // it went another way
  }
}

TEST("a claim to have put data without a grant ends the link") {
  for (const auto& [segment, count] : {std::pair{20u, 20u}, {8u, 9u}, {0u, 0u}, {1u, ~0u}}) {
    Duel duel(true);
    duel.send(duel.frame(FrameType::kPutComplete, 0, segment, count));
    duel.check_ended("that were not granted");
  }
}

TEST("frames of unknown types or of groups without the sender end the link") {
  for (const int type : {0, 21, 77, 255}) {
    Duel duel;
    duel.send(duel.frame(static_cast<FrameType>(type)));
    duel.check_ended("sent a frame of unknown type " + std::to_string(type));
  }
  for (const FrameType type : {FrameType::kPost, FrameType::kAbort}) {
    Duel duel;
    Frame frame = duel.frame(type);
    frame.header.group = 8;
    duel.send(frame);
    duel.check_ended("group it is not in");
  }
}

TEST("a frame with flags, payload or a link that its rule forbids ends the link") {
  const auto check = [](bool shares_memory, const FrameRule& rule, uint16_t flags, size_t n_bytes,
                        const std::string& why) {
    Duel duel(shares_memory);
    Frame frame = duel.frame(rule.type);
    frame.header.flags = flags;
    duel.send(frame, Bytes(n_bytes));
    duel.check_ended(std::string("sent a frame `") + rule.name + "` " + why);
  };
  for (const bool shares_memory : {false, true}) {
    for (const FrameRule& rule : frame_rules()) {
      if ((rule.over & (shares_memory ? kOverRing : kOverTcp)) == 0) {
        check(shares_memory, rule, 0, 0, shares_memory ? "over a ring" : "of shared memory");
        continue;
      }
      check(shares_memory, rule, 1 << 7, 0, "with flags 128");
      if (rule.carries == Carries::kText) continue;  // any length
      const size_t wrong = rule.carries == Carries::kSegment ? 0 : 15;
      check(shares_memory, rule, 0, wrong, "with " + std::to_string(wrong) + " B of payload");
    }
  }
}

TEST("control frames above their limits are refused before their payload is stored") {
  for (const FrameType type : {FrameType::kDisagree, FrameType::kAbort, FrameType::kLost,
                               FrameType::kPost, FrameType::kHeartbeat, FrameType::kGoodbye}) {
    Duel duel;
    duel.send(duel.frame(type), Bytes(4097));
    duel.check_ended("sent a frame of 4097 B that was not expected");
  }
}

// A segment's memory is released when the link has returned it, whatever a peer claims.
Job whole_to_rank_1(uint64_t n_elems) {
  Job job;
  job.kind = Kind::kDirectBroadcast;
  job.n_elems = n_elems;
  job.key = 6;
  return job;
}

TEST("shared-memory frames end another kind of link, and memory in flight is not released") {
  const std::pair<FrameType, std::string> cases[] = {{FrameType::kConsumed, "consumed"},
                                                     {FrameType::kPutComplete, "put complete"},
                                                     {FrameType::kOffer, "offer"}};
  for (const auto& [type, name] : cases) {
    Duel duel;
    duel.post(duel.engine.add_group(9, {0, 1}), whole_to_rank_1(20 * 16));
    duel.reads = false;  // the link keeps borrowing its payloads
    duel.net.options.copied = 0;
    duel.net.options.reads_late = 1;
    duel.send(with_place(duel.frame(FrameType::kGrant, 0, 20), {}));
    duel.send(duel.frame(type, 0, 20, 1));
    CHECK_EQ(duel.call->error.text,
             "broke the protocol: it sent a frame `" + name + "` of shared memory over a network");
    duel.reads = true;
    duel.settle();
    CHECK_EQ(duel.net.violation(), "");
  }
}

TEST("a peer that falsely confirms data in a full ring does not end the call") {
  Duel duel(true);
  duel.net.options.room = 1;  // frames
  duel.net.options.copied = 0;
  duel.reads = false;
  duel.post(duel.engine.add_group(9, {0, 1}), whole_to_rank_1(50));  // of one inline message
  duel.post(*duel.group, [] {
    Job second = whole_to_rank_1(50);
    second.key = 7;
    return second;
  }());
  duel.send(duel.frame(FrameType::kConsumed, 0, 4));
  CHECK(!duel.call->finished);
  duel.reads = true;
  duel.settle();
  CHECK(duel.call->finished && !duel.call->error);
  CHECK_EQ(duel.net.violation(), "");
}

TEST("a caller that writes to memory being sent gets the blame, and its peer does not") {
  Duel duel;
  duel.net.options.copied = 0;
  duel.net.options.reads_late = 1;
  duel.reads = false;
  duel.post(duel.engine.add_group(9, {0, 1}), whole_to_rank_1(20 * 16));
  duel.send(with_place(duel.frame(FrameType::kGrant, 0, 20), {}));
  for (uint64_t token = 1; token < 100; ++token) duel.engine.spoiled(1, token);
  CHECK(duel.call->error.fault == Fault::kMismatch);
  CHECK_EQ(duel.call->error.peer, 0);
  CHECK(has(duel.call->error.text, "the program of " + World::name(0) + " wrote to the memory of"));
  CHECK(duel.engine.state_of(1) == Engine::PeerState::kAlive);
}

TEST("a peer that sends results too early does not end the call") {
  Duel duel;
  duel.net.options.copied = 0;
  duel.net.options.reads_late = 1;
  duel.reads = false;
  Job job;
  job.kind = Kind::kShardedAllReduce;
  job.n_elems = 2 * 10 * 16;
  job.key = 6;
  duel.post(duel.engine.add_group(9, {0, 1}), job);
  // Rank 0's share is on its way to rank 1, which acts as if it had all of it.
  duel.send(with_place(duel.frame(FrameType::kGrant, 0, 10), {}));
  duel.send(with_place(duel.frame(FrameType::kGrant, 1, 10), {}));
  for (uint32_t segment = 0; segment < 10; ++segment)
    for (uint32_t flow = 0; flow < 2; ++flow)
      duel.send(duel.frame(FrameType::kData, flow, segment), Bytes(64));
  CHECK_EQ(duel.call->error.text, "");
  CHECK(!duel.call->finished);
  duel.reads = true;
  duel.settle();
  CHECK_EQ(duel.net.violation(), "");
}

TEST("early frames of a rank outside the group end its link, not the process") {
  Duel duel;
  Frame notice = duel.frame(FrameType::kPost);
  notice.header.group = 50;
  notice.header.key = 1;
  duel.send(notice);
  Group& group = duel.engine.add_group(50, {0, 2});
  Job job;
  job.key = 1;
  job.n_elems = 4;
  Bytes memory = input_of(job, 0, 2);
  const Posting posting{plan_of(job, 0, 2), 1, {{memory.data()}}, INT64_MAX};
  const auto call = duel.engine.post(group, posting);
  duel.settle();
  CHECK(!call->finished);
  duel.check_ended("group it is not in");
}

TEST("an early frame of a rank outside the group begins no served call") {
  Duel duel;
  PoolJob job{1, 1};
  job.n_elems = 40;
  const auto plan = plan_of(job, 1);
  Frame notice = duel.frame(FrameType::kPost);
  notice.header.group = 50;
  notice.header.key = 1;
  notice.header.descriptor = plan->descriptor_hash;
  duel.send(notice);
  Group& group = duel.engine.add_group(50, {2, 0});
  duel.engine.serve(group, plan, 0);
  CHECK_EQ(group.served.n_in_flight, 0u);
  notice.header.subject = 1;  // the member's own call has another subject
  duel.ends[2]->send(notice);
  duel.ends[2]->flush(duel.sink);
  duel.settle();
  CHECK_EQ(group.served.n_in_flight, 1u);
  CHECK(!group.life.has_ended());
}

// ---- fuzzing

uint32_t odd_number(FakeRandom& random) {
  constexpr uint32_t kOdd[] = {0, 1, 2, 7, 19, 20, 21, 255, 65536, 0x7fffffff, 0xfffffffe, ~0u};
  return random.chance(0.2) ? static_cast<uint32_t>(random.next()) : kOdd[random.below(12)];
}

// Changes one field of a frame.
void mutate(FakeRandom& random, Header& header, Bytes& payload) {
  switch (random.below(9)) {
    case 0:
      header.type = static_cast<FrameType>(random.below(21));
      break;
    case 1:
      header.flow = odd_number(random);
      break;
    case 2:
      header.segment = odd_number(random);
      break;
    case 3:
      header.count = odd_number(random);
      break;
    case 4:
      header.flags = static_cast<uint16_t>(random.below(4));
      break;
    case 5:
      header.key = random.below(8);
      break;
    case 6:
      if (random.chance(0.5)) {
        header.group = random.below(10);
        break;
      }
      (random.chance(0.5) ? header.subject : header.descriptor) = odd_number(random);
      break;
    case 7:
      payload.resize(random.below(random.chance(0.1) ? 5000 : 300));
      break;
    default:
      for (std::byte& byte : payload)
        if (random.chance(0.2)) byte = static_cast<std::byte>(random.next());
  }
}

TEST("a rank that falsifies some of its frames cannot crash the others or keep them waiting") {
  for (uint64_t seed = 0; seed < seeds(400); ++seed) {
    World::Options options;
    options.net.seed = seed;
    options.net.shares_memory = seed % 2 == 1;
    options.net.max_inline = 128;
    options.net.delays = options.net.reorders = 0.1;
    World world(3, options);
    FakeRandom random(seed);
    world.net.tamper = [&](int from, Header& header, Bytes& payload) {
      if (from == 1 && random.chance(0.05)) mutate(random, header, payload);
    };
    for (uint64_t key = 0; key < 6; ++key) {
      const Job job = random_job(random, key, 3, 300);
      for (int rank = 0; rank < 3; ++rank) world.post(rank, job, world.now + kSecond);
    }
    CHECK(world.run_all(1500));
    CHECK(world.engine(0).state_of(2) == Engine::PeerState::kAlive);
    CHECK(world.engine(2).state_of(0) == Engine::PeerState::kAlive);
    CHECK_EQ(world.net.violation(), "");
  }
}

TEST("a rank that invents frames cannot crash anyone") {
  for (uint64_t seed = 0; seed < seeds(1500); ++seed) {
    Duel duel(seed % 2 == 1);
    FakeRandom random(seed);
    for (int n = 0; n < 60 && duel.engine.link(1) != nullptr; ++n) {
      // Mostly plausible: the few flows and segments that exist, in frames of every type.
      Frame frame = duel.frame(
          static_cast<FrameType>(1 + random.below(9)), static_cast<uint32_t>(random.below(2)),
          static_cast<uint32_t>(random.below(21)), static_cast<uint32_t>(random.below(3)));
      const bool has_place = random.chance(0.7);
      const auto region = static_cast<uint32_t>(random.below(6));
      const auto cts_flow =
          random.chance(0.7) ? Place::kNoFlow : static_cast<uint32_t>(random.below(3));
      if (has_place)
        frame.carry({region, cts_flow, random.chance(0.5) ? 0 : random.below(20) * 64});
      frame.header.flags = static_cast<uint16_t>(random.chance(0.3) ? random.below(4) : 0);
      Bytes payload(frame.header.type == FrameType::kData ? 64 : 0);
      if (random.chance(0.03)) mutate(random, frame.header, payload);
      payload.resize(std::min(payload.size(), duel.net.options.max_inline));
      duel.send(frame, payload);
      if (random.chance(0.02)) duel.engine.tick(static_cast<int64_t>(n) * kMillisecond);
    }
    CHECK(duel.engine.state_of(2) == Engine::PeerState::kAlive ||
          duel.engine.state_of(1) == Engine::PeerState::kLost || duel.call->finished);
    CHECK_EQ(duel.net.violation(), "");
  }
}

TEST("headers handed to the engine directly never name memory outside their buffers") {
  for (uint64_t seed = 0; seed < seeds(300); ++seed) {
    Duel duel;
    FakeRandom random(seed);
    for (int n = 0; n < 100; ++n) {
      Frame frame = duel.frame(static_cast<FrameType>(random.below(21)),
                               static_cast<uint32_t>(random.below(3)), odd_number(random),
                               odd_number(random));
      frame.header.flags = static_cast<uint16_t>(random.below(4));
      frame.header.length = static_cast<uint32_t>(random.chance(0.5) ? 64 : random.below(6000));
      Bytes ignored;
      if (random.chance(0.3)) mutate(random, frame.header, ignored);
      std::span<std::byte> receive_buffer;
      if (frame.header.length > 0) receive_buffer = duel.engine.receive_buffer(1, frame.header);
      CHECK(receive_buffer.empty() || receive_buffer.size() == frame.header.length);
      if (receive_buffer.size() != frame.header.length) continue;
      for (std::byte& byte : receive_buffer) byte = static_cast<std::byte>(random.next());
      duel.engine.arrived(1, frame.header, receive_buffer);
      if (random.chance(0.5)) duel.engine.sent(1, random.below(100));
      if (random.chance(0.3)) duel.engine.progress();
    }
  }
}

}  // namespace
}  // namespace shoal::test
