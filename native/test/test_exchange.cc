// Exchanges whose lengths only two ranks know: right for any lengths, and an error on every rank
// when the two differ.
#include "test/check.h"
#include "test/world.h"

namespace shoal::test {
namespace {

using Lengths = std::vector<std::vector<uint64_t>>;  // elements, by source and target

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

ChunkLayout layout_of(const std::vector<uint64_t>& lengths) {
  ChunkLayout layout;
  uint64_t at = 0;
  for (const uint64_t length : lengths) {
    layout.offset.push_back(at);
    layout.n_bytes.push_back(length * 4);
    at += length * 4;
  }
  return layout;
}

std::vector<uint64_t> column(const Lengths& lengths, int rank) {
  std::vector<uint64_t> received;
  for (const auto& row : lengths) received.push_back(row[static_cast<size_t>(rank)]);
  return received;
}

float value(int source, int target, uint64_t at) {
  return static_cast<float>(source * 10'000'000 + target * 1'000'000) + static_cast<float>(at);
}

Bytes blocks(const std::vector<std::pair<int, int>>& ends, const std::vector<uint64_t>& lengths) {
  std::vector<float> all;
  for (size_t block = 0; block < ends.size(); ++block)
    for (uint64_t at = 0; at < lengths[block]; ++at)
      all.push_back(value(ends[block].first, ends[block].second, at));
  return bytes_of(all);
}

TestCall& exchange(World& world, int rank, uint64_t key, const std::vector<uint64_t>& sent,
                   const std::vector<uint64_t>& received) {
  Plan plan;
  plan.program =
      Recipes::all().find("all_to_all", "pairwise", world.size(), 0, "").program(rank, false);
  plan.layout[kInput] = layout_of(sent);
  plan.layout[kOutput] = layout_of(received);
  plan.by_pair = true;
  Job job;
  job.key = key;
  std::vector<std::pair<int, int>> ends;
  for (int to = 0; to < world.size(); ++to) ends.emplace_back(rank, to);
  return world.post_plan(rank, *world.groups[static_cast<size_t>(rank)], job,
                         seal(std::move(plan), DType::kFloat32, FoldOp::kSum, 1, 256, "exchange"),
                         blocks(ends, sent));
}

Bytes expected_of(const Lengths& lengths, int rank) {
  std::vector<std::pair<int, int>> ends;
  for (int from = 0; from < static_cast<int>(lengths.size()); ++from) ends.emplace_back(from, rank);
  return blocks(ends, column(lengths, rank));
}

Lengths random_lengths(FakeRandom& random, int size) {
  constexpr uint64_t kLengths[] = {0, 0, 1, 7, 16, 64, 65, 700};
  Lengths lengths(static_cast<size_t>(size), std::vector<uint64_t>(static_cast<size_t>(size)));
  for (auto& row : lengths)
    for (uint64_t& length : row) length = kLengths[random.below(8)];
  return lengths;
}

World::Options options_for(uint64_t seed) {
  constexpr size_t kInlines[] = {0, 16, 128, 1024};
  World::Options options;
  options.net.seed = seed;
  options.net.shares_memory = seed % 2 == 1;
  options.net.max_inline = kInlines[seed / 2 % 4];
  options.net.delays = options.net.splits = options.net.reads_late = 0.2;
  options.net.reorders = seed % 3 == 0 ? 0.3 : 0;
  options.net.refuses_share = 0.2;
  options.slot_quota = 1 + static_cast<uint32_t>(seed / 8 % 3);
  return options;
}

TEST("blocks of any length reach their ranks, with several calls in flight") {
  for (uint64_t seed = 0; seed < seeds(160); ++seed) {
    const int size = 1 + static_cast<int>(seed % 5);
    World world(size, options_for(seed));
    FakeRandom random(seed);
    std::vector<std::tuple<int, TestCall*, Bytes>> calls;
    for (uint64_t key = 1; key <= 3; ++key) {
      const Lengths lengths = random_lengths(random, size);
      for (const int rank : world.shuffled(size)) {
        TestCall& call =
            exchange(world, rank, key, lengths[static_cast<size_t>(rank)], column(lengths, rank));
        calls.emplace_back(rank, &call, expected_of(lengths, rank));
        if (random.chance(0.5)) world.step();
      }
    }
    CHECK(world.run_all());
    for (const auto& [rank, call, result] : calls)
      if (!call->ok() || call->result != result)
        fail(__FILE__, __LINE__, "seed " + std::to_string(seed) + ": wrong or failed");
    CHECK(world.is_untouched());
    CHECK_EQ(world.net.violation(), "");
  }
}

TEST("a small exchange without empty blocks takes one frame from each rank to each") {
  World world(3, {});
  const Lengths lengths(3, std::vector<uint64_t>(3, 5));
  for (int rank = 0; rank < 3; ++rank) exchange(world, rank, 1, lengths[0], lengths[0]);
  CHECK(world.run_all(50));
  for (int rank = 0; rank < 3; ++rank) CHECK_EQ(world.net.n_delivered_to(rank), 2u);
}

TEST("an exchange survives a rank that is seconds late and greeted again") {
  for (const uint64_t elems : {3u, 700u}) {  // in the frame, and announced
    World world(3, {});
    const Lengths lengths(3, std::vector<uint64_t>(3, elems));
    std::vector<TestCall*> calls;
    for (int rank = 0; rank < 3; ++rank) {
      calls.push_back(&exchange(world, rank, 1, lengths[0], lengths[0]));
      if (rank == 1) world.run_steps(3'000);
    }
    CHECK(world.run_all(500));
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(calls[static_cast<size_t>(rank)]->ok());
      CHECK(calls[static_cast<size_t>(rank)]->result == expected_of(lengths, rank));
    }
  }
}

// Each rank calls an exchange and then a collective that needs all other ranks.
void try_difference(uint64_t seed, uint64_t sent, uint64_t received) {
  const int size = 2 + static_cast<int>(seed % 3);
  World world(size, options_for(seed));
  FakeRandom random(seed);
  Lengths lengths = random_lengths(random, size);
  const int source = static_cast<int>(random.below(static_cast<uint64_t>(size)));
  const int target =
      (source + 1 + static_cast<int>(random.below(static_cast<uint64_t>(size) - 1))) % size;
  lengths[static_cast<size_t>(source)][static_cast<size_t>(target)] = sent;
  std::vector<std::pair<TestCall*, TestCall*>> calls(static_cast<size_t>(size));
  Job next;
  next.kind = Kind::kDirectAllReduce;
  next.n_elems = 5;
  next.key = 2;
  for (const int rank : world.shuffled(size)) {
    std::vector<uint64_t> columns = column(lengths, rank);
    if (rank == target) columns[static_cast<size_t>(source)] = received;
    TestCall& call = exchange(world, rank, 1, lengths[static_cast<size_t>(rank)], columns);
    world.run_steps(static_cast<int>(random.below(20)));
    calls[static_cast<size_t>(rank)] = {&call, nullptr};
  }
  world.run([&] {
    return std::all_of(calls.begin(), calls.end(), [](auto pair) { return pair.first->finished; });
  });
  for (int rank = 0; rank < size; ++rank)
    calls[static_cast<size_t>(rank)].second = &world.post(rank, next);
  CHECK(world.run_all());
  const std::string words = World::name(source) + " sends " + std::to_string(sent) +
                            " elements to " + World::name(target) + ", which takes " +
                            std::to_string(received);
  for (const auto& [first, second] : calls) {
    const Error& error = first->error ? first->error : second->error;
    if (error.fault != Fault::kMismatch || !has(error.text, words))
      fail(__FILE__, __LINE__, "seed " + std::to_string(seed) + ": " + error.text);
  }
  CHECK(world.is_untouched());
}

TEST("two ranks that differ on a block's length end the group with both numbers in the error") {
  constexpr std::pair<uint64_t, uint64_t> kDifferent[] = {{3, 5},     {5, 3},    {0, 4},   {4, 0},
                                                          {0, 700},   {700, 0},  {3, 700}, {700, 3},
                                                          {700, 701}, {640, 700}};
  for (uint64_t seed = 0; seed < seeds(24); ++seed)
    for (const auto& [sent, received] : kDifferent) try_difference(seed, sent, received);
}

}  // namespace
}  // namespace shoal::test
