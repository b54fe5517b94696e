#include <algorithm>

#include "base/page.h"
#include "engine/segments/call.h"
#include "test/check.h"
#include "test/truth.h"

namespace shoal::test {
namespace {

Narrow in_blocks_of(uint32_t n_elems) {
  Narrow codec{};
  codec.block = n_elems;
  return codec;
}

template <class Try>
void for_every_program(Try try_one) {
  for (const Recipe& recipe : Recipes::all().recipes()) {
    for (const FoldOp op : {FoldOp::kSum, FoldOp::kAvg}) {  // without Finish, and with it
      Job job;
      job.n_elems = 100;
      job.op = op;
      job.is_uneven = true;
      try_one(job_of(recipe, job), recipe.size);
    }
  }
}

TEST("there are programs of every collective, for all group sizes that tests use") {
  CHECK(Recipes::all().collectives().contains("all_reduce"));
  for (const int size : {2, 3, 4, 5, 6, 7, 8, 13})
    for (const auto& [collective, meaning] : Recipes::all().collectives())
      CHECK(std::any_of(
          Recipes::all().of_size(size).begin(), Recipes::all().of_size(size).end(),
          [&, name = collective](const Recipe* recipe) { return recipe->collective == name; }));
}

TEST("flows count each pair's sends and receives from zero, in step order") {
  ProgramBuilder steps(3);
  steps.send(2, 0);
  steps.recv(2, 1);
  steps.send(1, 0);
  steps.send(2, 3);
  steps.finish(0);
  steps.recv(2, 4);
  const auto program = steps.done();
  CHECK(program->sends_to[2] == (std::vector<uint32_t>{0, 3}));
  CHECK(program->recvs_from[2] == (std::vector<uint32_t>{1, 5}));
  CHECK(program->sends_to[1] == (std::vector<uint32_t>{2}));
  CHECK(program->recvs_from[1].empty());
  CHECK(program->sends_to[0].empty());
  CHECK_EQ(program->steps[3].flow, 1u);
  CHECK_EQ(program->steps[5].flow, 1u);
  CHECK_EQ(program->steps[2].flow, 0u);
  CHECK(program->peers == (std::vector<int32_t>{2, 1}));
}

TEST("the k-th send to a peer carries as many bytes as its k-th receive takes, at every size") {
  for_every_program([](const Job& job, int size) {
    std::vector<std::shared_ptr<Plan>> plans;
    for (int rank = 0; rank < size; ++rank) plans.push_back(plan_of(job, rank, size));
    for (int from = 0; from < size; ++from) {
      for (int to = 0; to < size; ++to) {
        const Program& sender = *plans[static_cast<size_t>(from)]->program;
        const Program& receiver = *plans[static_cast<size_t>(to)]->program;
        const auto& sends = sender.sends_to[static_cast<size_t>(to)];
        const auto& recvs = receiver.recvs_from[static_cast<size_t>(from)];
        CHECK_EQ(sends.size(), recvs.size());
        for (size_t flow = 0; flow < std::min(sends.size(), recvs.size()); ++flow) {
          const Step& send = sender.steps[sends[flow]];
          const Step& recv = receiver.steps[recvs[flow]];
          CHECK_EQ(send.flow, recv.flow);
          CHECK_EQ(plans[static_cast<size_t>(from)]->chunk_bytes(send.buffer, send.chunk),
                   plans[static_cast<size_t>(to)]->chunk_bytes(recv.buffer, recv.chunk));
        }
      }
    }
  });
}

TEST("a step's dependency is earlier, unlocks the step and has as many segments") {
  for_every_program([](const Job& job, int size) {
    for (int rank = 0; rank < size; ++rank) {
      const auto plan = plan_of(job, rank, size);
      const auto& steps = plan->program->steps;
      size_t n_waits = 0, n_unlocks = 0;
      for (uint32_t at = 0; at < steps.size(); ++at) {
        n_waits += steps[at].waits_for.size();
        n_unlocks += steps[at].unlocks.size();
        for (const uint32_t before : steps[at].waits_for) {
          CHECK(before < at);
          const auto& unlocks = steps[before].unlocks;
          CHECK(std::find(unlocks.begin(), unlocks.end(), at) != unlocks.end());
          CHECK_EQ(plan->n_segments(steps[before]), plan->n_segments(steps[at]));
        }
      }
      CHECK_EQ(n_waits, n_unlocks);
    }
  });
}

TEST("a receive that waits only for a send to the same peer uses it as implicit clear to send") {
  ProgramBuilder steps(3);
  steps.send(1, 0);        // 0
  steps.recv(1, 0);        // 1: cts_flow is 0
  steps.send(1, 1);        // 2
  steps.send(2, 1);        // 3
  steps.recv(1, 1);        // 4: waits for two sends
  steps.send(2, 2);        // 5
  steps.recv(1, 2);        // 6: waits for a send to another peer
  steps.recv(1, 2, true);  // 7: waits for a receive
  steps.recv(1, 3);        // 8: waits for nothing
  const auto program = steps.done();
  const std::vector<uint32_t> cts_flows = {~0u, 0, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
  for (size_t at = 0; at < cts_flows.size(); ++at)
    CHECK_EQ(program->steps[at].cts_flow, cts_flows[at]);
}

TEST("a plan that the engine cannot run is refused with a reason") {
  ProgramBuilder steps(3);
  steps.send(1, 0);
  steps.recv(2, 1, true);
  steps.recv(2, 0);
  Plan good;
  good.program = steps.done();
  good.layout[0] = equal_layout(64, 2);
  good.segment_bytes = kSegmentBytes;
  CHECK_EQ(good.flaw(), "");
  const auto refused = [&](auto spoil, const std::string& why) {
    Plan plan = good;
    spoil(plan);
    CHECK_EQ(plan.flaw(), why);
  };
  refused([](Plan& plan) { plan.divisor = 0; }, "a plan needs a divisor and a lane");
  refused([](Plan& plan) { plan.n_lanes = 0; }, "a plan needs a divisor and a lane");
  for (const uint32_t n_bytes : {0u, 1000u, kSegmentBytes + 1024})
    refused([&](Plan& plan) { plan.segment_bytes = n_bytes; },
            "segments must be whole KiB, at most SEGMENT_BYTES");
  refused([](Plan& plan) { plan.rounds_own = true; },
          "a plan that rounds its own parts needs a narrow codec");
  refused(
      [](Plan& plan) {
        plan.narrow = in_blocks_of(512);
        plan.segment_bytes = 1024;
      },
      "segments must be whole blocks of the codec");
  refused([](Plan& plan) { plan.narrow = in_blocks_of(32); },
          "chunks must begin at a block of the codec");
  refused([](Plan& plan) { plan.n_workers = 4; },
          "a plan must have no more workers than its group has ranks");
  refused([](Plan& plan) { plan.n_workers = 2; },
          "a chunk from a server is a result, and must be stored in DATA");
  refused([](Plan& plan) { plan.layout[0] = equal_layout(64, 1); },
          "a step names a chunk that the layout does not have");
  refused([](Plan& plan) { plan.layout[0].offset.pop_back(); },
          "a step names a chunk that the layout does not have");
  refused([](Plan& plan) { plan.by_pair = true; },
          "lengths by pair of ranks allow at most one flow each way");
}

TEST("every result of a sharded all-reduce comes through an implicit clear to send") {
  for (const int size : {2, 3, 8}) {
    const auto program = Recipes::all().find("all_reduce", "sharded", size, 0, "").program(0, true);
    for (int peer = 1; peer < size; ++peer) {
      const auto& recvs = program->recvs_from[static_cast<size_t>(peer)];
      CHECK_EQ(program->steps[recvs[0]].cts_flow, ~0u);
      CHECK_EQ(program->steps[recvs[1]].cts_flow, 0u);
    }
  }
}

TEST("sends of one value share a version, and sends of the chunk's next value do not") {
  ProgramBuilder steps(3);
  steps.send(1, 0);
  steps.send(2, 0);
  steps.send(1, 1);
  steps.recv(1, 0, true);
  steps.send(1, 0);
  steps.send(2, 0);
  const auto program = steps.done();
  const auto version = [&](size_t at) { return program->steps[at].version; };
  CHECK_EQ(version(0), version(1));
  CHECK_EQ(version(4), version(5));
  CHECK(version(0) != version(2));
  CHECK(version(0) != version(4));
}

TEST("segments cover a chunk exactly, and an empty chunk has no segments") {
  for (const uint64_t n_bytes : {0, 1, 63, 64, 65, 128, 1000}) {
    Plan plan;
    plan.layout[kData] = equal_layout(n_bytes, 1);
    plan.program = point_to_point(0, 2, 0, 1);
    Call call;
    call.plan = seal(plan, DType::kUint8, FoldOp::kSum, 1, 64, "test");
    const Step& step = call.plan->program->steps[0];
    uint64_t covered = 0;
    for (uint32_t segment = 0; segment < call.plan->n_segments(step); ++segment) {
      const size_t length = call.segment_bytes(step, segment);
      CHECK(length > 0 && length <= 64);
      covered += length;
    }
    CHECK_EQ(covered, n_bytes);
    CHECK_EQ(call.plan->n_segments(step), (n_bytes + 63) / 64);
  }
}

TEST("chunks are found by an offset from one pointer, or by pointers of their own") {
  std::byte memory[64];
  Plan plan;
  plan.layout[kOutput] = equal_layout(16, 3);
  plan.program = point_to_point(0, 2, 0, 1);
  Call call;
  call.plan = std::make_shared<Plan>(plan);
  call.memory[kOutput] = {memory};
  CHECK(call.chunk(kOutput, 2) == memory + 32);
  call.memory[kOutput] = {memory + 40, memory + 8, memory};
  CHECK(call.chunk(kOutput, 0) == memory + 40);
  CHECK(call.chunk(kOutput, 2) == memory);
}

TEST("only segments whose pages all belong to the call are named by reference") {
  const size_t kPage = page_bytes();
  const auto memory = std::make_unique<std::byte[]>(8 * kPage);
  const auto odd = reinterpret_cast<uintptr_t>(memory.get()) % kPage;
  Regions::Region region;
  region.data = memory.get() + (kPage - odd) % kPage;
  region.size = region.used = 7 * kPage;
  region.shared_upto = region.data + region.size;
  Plan plan;
  plan.layout[kData] = equal_layout(4 * kPage, 1);
  plan.program = point_to_point(0, 2, 0, 1);
  Call call;
  call.plan = seal(plan, DType::kUint8, FoldOp::kSum, 1, static_cast<uint32_t>(kPage / 4), "test");
  const Step& step = call.plan->program->steps[0];
  const auto upto = [&](size_t offset, uint32_t from) {
    call.memory[kData] = {region.data + offset};
    return call.fenceable(region, step, from, 16);
  };
  CHECK_EQ(upto(0, 0), 16u);
  CHECK_EQ(upto(kPage, 3), 16u);
  CHECK_EQ(upto(16, 0), 0u);   // shares its first page
  CHECK_EQ(upto(16, 3), 3u);   // this segment begins on the first page
  CHECK_EQ(upto(16, 4), 15u);  // the last segment ends on a page of others
  CHECK_EQ(upto(kPage - 1, 0), 0u);
  CHECK_EQ(upto(kPage - 1, 1), 12u);
  CHECK_EQ(upto(3 * kPage, 5), 16u);
  region.used = 4 * kPage + 100;  // no other memory lies behind the buffer
  CHECK_EQ(upto(100, 4), 16u);
  region.shared_upto = region.data + 2 * kPage;  // the pages behind were fenced
  CHECK_EQ(upto(0, 0), 8u);
  CHECK_EQ(upto(0, 7), 8u);
  CHECK_EQ(upto(0, 8), 8u);
}

// The numbers are from the definition, computed by other means: FNV-1a 64 with offset basis
// 0xcbf29ce484222325 and prime 0x100000001b3 (draft-eastlake-fnv), then the mix in program.cc.
TEST("the hash of a descriptor is the same in every build") {
  CHECK_EQ(hash_of(""), 0x8570e250fe4c2473u);
  CHECK_EQ(hash_of("a"), 0x82b19d9859a61322u);
  CHECK_EQ(hash_of("all_reduce float32[1024] sum by ring"), 0xb793461d0dc89a15u);
  CHECK_EQ(hash_of("\xff"), 0x28fbdd7e7eb5ec33u);
}

TEST("descriptors that differ in any field have different hashes") {
  std::vector<uint64_t> hashes;
  for (int n = 0; n < 2000; ++n) {
    hashes.push_back(hash_of("all_reduce float32[" + std::to_string(n) + "] sum by ring"));
    hashes.push_back(hash_of("all_reduce float32[" + std::to_string(n) + "] sum by sharded"));
  }
  std::sort(hashes.begin(), hashes.end());
  CHECK(std::adjacent_find(hashes.begin(), hashes.end()) == hashes.end());
}

}  // namespace
}  // namespace shoal::test
