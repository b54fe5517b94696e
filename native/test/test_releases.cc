// Two groups move one buffer at the same time, and one ends: the other's calls lose nothing.

#include "test/check.h"
#include "test/faults.h"

namespace shoal::test {
namespace {

constexpr uint64_t kCalls = 3;

// The contents that rank 0 sends, in every call of both groups.
class Sent {
 public:
  Sent(const Bytes& bytes, bool is_shared) : heap_(bytes) {
    if (!is_shared) return;
    CHECK(!Regions::of_process().allocate(bytes.size(), region_));
    std::copy(bytes.begin(), bytes.end(), region_.data);
  }
  ~Sent() {
    if (region_.id != 0) Regions::of_process().release(region_.data);
  }
  Sent(const Sent&) = delete;
  std::byte* at() { return region_.id != 0 ? region_.data : heap_.data(); }

 private:
  Bytes heap_;
  Regions::Region region_;
};

// Every way that a segment moves, over every kind of link that the seeded network has.
struct Medium {
  const char* name;
  bool shares_memory = false, from_shared = false, into_shared = false;
  uint64_t n_elems = 3000;
  size_t max_inline = 64;
  uint32_t n_paths = 0;
};
const Medium kMedia[] = {
    {.name = "eager"},
    {.name = "granted, in frames"},
    {.name = "eager over paths", .n_paths = 2},
    {.name = "granted over a path", .n_elems = 100'000, .n_paths = 1},
    {.name = "granted over paths", .n_elems = 100'000, .n_paths = 2},
    {.name = "eager in a host", .shares_memory = true, .max_inline = 16u << 10},
    {.name = "slots", .shares_memory = true},
    {.name = "by reference", .shares_memory = true, .from_shared = true},
    {.name = "put", .shares_memory = true, .into_shared = true},
    {.name = "put from shared memory",
     .shares_memory = true,
     .from_shared = true,
     .into_shared = true},
};

World::Options options_of(const Medium& medium, uint64_t seed) {
  World::Options options = options_for(seed);
  options.net.shares_memory = medium.shares_memory;
  options.net.max_inline = medium.max_inline;
  options.net.n_paths = medium.n_paths;
  options.net.room = seed % 3 == 0 ? 3 : 0;
  options.shares_buffers = medium.into_shared ? 1 : 0;
  return options;
}

void check_two_groups(const Medium& medium, Kind kind, uint64_t seed) {
  World world(3, options_of(medium, seed));
  Job job = large(kind, medium.n_elems);
  job.segment_bytes = 4096;
  const Bytes input = input_of(job, 0, 3);
  Sent sent(input, medium.from_shared);
  const auto post_on_0 = [&](Group& group, uint64_t key) {
    const auto n_members = static_cast<int>(group.members.size());
    return world.engine(0).post(
        group, Posting{plan_of(job, 0, n_members), key, {{sent.at()}}, World::kNever});
  };
  struct Both {
    Group& failing;
    Group& going;
  };
  const auto groups_of = [&](int rank) {
    return Both{world.add_group(rank, 60, {0, 1, 2}), world.add_group(rank, 61, {0, 1})};
  };
  const Both on_0 = groups_of(0), on_1 = groups_of(1);
  std::vector<std::shared_ptr<Call>> lost, kept;
  std::vector<const TestCall*> received;
  for (uint64_t key = 1; key <= kCalls; ++key) {
    job.key = key;
    lost.push_back(post_on_0(on_0.failing, key));
    kept.push_back(post_on_0(on_0.going, key));
    if (world.random().chance(0.5)) world.post_in(1, on_1.failing, job);
    received.push_back(&world.post_in(1, on_1.going, job));
    world.run_steps(static_cast<int>(world.random().below(3)));
  }
  world.run_steps(static_cast<int>(world.random().below(30)));
  world.engine(0).abort_group(on_0.failing, {Fault::kClosed, 0, "enough"}, true);
  const auto are_over = [](const auto& calls) {
    return std::all_of(calls.begin(), calls.end(),
                       [](const auto& call) { return !!call->finished; });
  };
  const bool all_over =
      world.run([&] { return are_over(lost) && are_over(kept); }, 5000) && world.run_all(5000);
  bool all_right = all_over;
  for (uint64_t at = 0; at < kCalls; ++at)
    all_right &= !kept[at]->error && received[at]->ok() && received[at]->result == input;
  if (!all_right || !world.net.violation().empty())
    fail(medium.name, static_cast<int>(seed),
         std::string(kind.algorithm) + (all_over ? "" : ", something waits for ever") + ": " +
             world.net.violation());
}

TEST("a group that ends takes nothing from another group's calls that send the same buffer") {
  for (const Medium& medium : kMedia)
    for (const Kind kind : {Kind::kDirectBroadcast, Kind::kChainBroadcast})
      for (uint64_t seed = 0; seed < seeds(40); ++seed) check_two_groups(medium, kind, seed);
}

}  // namespace
}  // namespace shoal::test
