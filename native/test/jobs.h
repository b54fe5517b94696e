// Collectives to run on the engine: any algorithm of src/shoal/schedule, with any lengths.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "test/builder.h"
#include "test/fake_link.h"
#include "test/programs.h"

namespace shoal::test {

// The number of seeds a test tries; SHOAL_SEEDS=50 in the environment multiplies it by fifty.
inline uint64_t seeds(uint64_t n) {
  const char* const factor = std::getenv("SHOAL_SEEDS");
  return factor == nullptr ? n : n * std::strtoull(factor, nullptr, 10);
}

// A collective and an algorithm, by the names of src/shoal/schedule/table.py.
struct Kind {
  std::string_view collective, algorithm;

  bool operator==(const Kind&) const = default;

  // The ones that tests call by name.
  static const Kind kDirectAllReduce, kShardedAllReduce, kRingAllReduce;
  static const Kind kDirectBroadcast, kChainBroadcast;
  static const Kind kDirectAllGather, kRingAllGather;
};
inline constexpr Kind Kind::kDirectAllReduce{"all_reduce", "direct"};
inline constexpr Kind Kind::kShardedAllReduce{"all_reduce", "sharded"};
inline constexpr Kind Kind::kRingAllReduce{"all_reduce", "ring"};
inline constexpr Kind Kind::kDirectBroadcast{"broadcast", "direct"};
inline constexpr Kind Kind::kChainBroadcast{"broadcast", "chain"};
inline constexpr Kind Kind::kDirectAllGather{"all_gather", "direct"};
inline constexpr Kind Kind::kRingAllGather{"all_gather", "ring"};

// One collective, the same on every rank.
struct Job {
  Kind kind = Kind::kRingAllReduce;
  uint64_t key = 0;
  uint64_t n_elems = 0;  // of the buffer in place, or of one rank's block
  DType dtype = DType::kFloat32;
  FoldOp op = FoldOp::kSum;
  int root = 0;
  std::string_view hosts = "";  // as in Recipe; empty: the first layout there is
  bool is_uneven = false;       // blocks or chunks differ in length; the algorithm must support it
  uint32_t segment_bytes = 64;
  Subject subject = 0;
  uint64_t seed = 0;  // of the data, and of uneven lengths
  Codec codec = Codec::kIdentity;
  std::vector<int> places;  // the host of each rank, whose ranks share memory; empty: none do

  bool operator==(const Job&) const = default;

  bool is(std::string_view collective) const { return kind.collective == collective; }
  const Meaning& meaning() const { return Recipes::all().meaning_of(kind.collective); }
  bool folds() const { return meaning().folds || meaning().folds_again; }
  bool is_far(int one, int other) const {
    return places.empty() || places[static_cast<size_t>(one)] != places[static_cast<size_t>(other)];
  }
  bool has_blocks() const { return !meaning().in_place(); }
  const Recipe& recipe(int size) const {
    return Recipes::all().find(kind.collective, kind.algorithm, size, root, hosts);
  }
  std::string descriptor() const {
    std::string text = std::string(kind.collective) + " by " + std::string(kind.algorithm) + " " +
                       name_of(dtype) + "[" + std::to_string(n_elems) + "] " + name_of(op);
    const std::string& word = meaning().root_word;
    if (!word.empty()) text += " " + word + " rank " + std::to_string(root);
    if (!hosts.empty()) text += " on hosts " + std::string(hosts);
    if (codec != Codec::kIdentity) text += " in codec " + std::to_string(static_cast<int>(codec));
    return is_uneven ? text + " in uneven parts of seed " + std::to_string(seed) : text;
  }
};

// ---- codecs

// The elements of a block; 1 without a codec.
inline uint32_t block_of(Codec codec) {
  const auto narrow = narrow_for(codec, DType::kFloat32, FoldOp::kSum);
  return narrow ? narrow->block : 1;
}

// Segments of at least this length, in whole blocks.
inline uint32_t whole_blocks(uint32_t segment_bytes, Codec codec) {
  const auto n_block_bytes = static_cast<uint32_t>(block_of(codec) * sizeof(float));
  return (segment_bytes + n_block_bytes - 1) / n_block_bytes * n_block_bytes;
}

// A narrow codec that keeps all elements, in blocks shorter than the calls of these tests.
inline Codec codec_of(uint64_t seed) {
  std::vector<Codec> all;
  for (size_t codec = 1; codec < kCodecs; ++codec)
    if (narrow_for(Codec(codec), DType::kFloat32, FoldOp::kSum) && block_of(Codec(codec)) <= 32)
      all.push_back(Codec(codec));
  return all[seed % all.size()];
}

// ---- plans

// Elements of every chunk of the buffer in place, or of every rank's block.
inline std::vector<uint64_t> lengths_of(const Job& job, int size) {
  const uint32_t n = job.has_blocks() ? static_cast<uint32_t>(size) : job.recipe(size).n_chunks;
  std::vector<uint64_t> lengths(n, job.n_elems);
  FakeRandom random(job.seed + 77);
  if (job.has_blocks()) {
    for (uint64_t& length : lengths)
      if (job.is_uneven) length = random.chance(0.2) ? 0 : random.below(2 * job.n_elems + 1);
    return lengths;
  }
  // As src/shoal/shapes.py cuts (the last ones may be shorter or empty), or anywhere.
  const uint64_t block = block_of(job.codec);
  const uint64_t stride = ((job.n_elems + n - 1) / n + block - 1) / block * block;
  uint64_t left = job.n_elems;
  for (uint32_t chunk = 0; chunk < n; ++chunk) {
    const uint64_t most =
        job.is_uneven ? (random.below(left + 1) + block - 1) / block * block : stride;
    lengths[chunk] = chunk + 1 == n ? left : std::min(left, most);
    left -= lengths[chunk];
  }
  return lengths;
}

inline ChunkLayout consecutive(const std::vector<uint64_t>& lengths, size_t item) {
  ChunkLayout layout;
  uint64_t at = 0;
  for (const uint64_t length : lengths) {
    layout.offset.push_back(at * item);
    layout.n_bytes.push_back(length * item);
    at += length;
  }
  return layout;
}

// The blocks or chunks that a rank has, of all ranks' blocks or of all chunks.
inline std::vector<uint64_t> blocks_of(const Job& job, Blocks which, int rank,
                                       const std::vector<uint64_t>& lengths) {
  if (which == Blocks::kOwn) return {lengths[static_cast<size_t>(rank)]};
  return which == Blocks::kAtRoot && rank != job.root ? std::vector<uint64_t>() : lengths;
}

inline std::shared_ptr<Plan> plan_of(const Job& job, int rank, int size) {
  const Recipe& recipe = job.recipe(size);
  const bool average = job.op == FoldOp::kAvg && job.folds();
  const size_t item = size_of(job.dtype);
  const std::vector<uint64_t> lengths = lengths_of(job, size);
  Plan plan;
  plan.narrow = narrow_for(job.codec, job.dtype, job.op);
  plan.program = recipe.program(rank, average || plan.narrow.has_value());
  if (job.has_blocks()) {
    plan.layout[kInput] = consecutive(blocks_of(job, job.meaning().reads, rank, lengths), item);
    plan.layout[kOutput] = consecutive(blocks_of(job, job.meaning().writes, rank, lengths), item);
  } else {
    plan.layout[kData] = consecutive(lengths, item);
  }
  std::vector<uint64_t> like;
  for (const uint32_t chunk : recipe.scratch(rank)) {
    like.push_back(lengths[chunk]);
    plan.scratch_first.push_back(
        job.has_blocks() ? 0
                         : std::accumulate(lengths.begin(), lengths.begin() + chunk, uint64_t{0}));
  }
  plan.layout[kScratch] = consecutive(like, item);
  return seal(std::move(plan), job.dtype, job.op, average ? static_cast<uint32_t>(size) : 1,
              whole_blocks(job.segment_bytes, job.codec), job.descriptor());
}

// ---- jobs

// The job that runs this recipe, with a supported operation and lengths.
inline Job job_of(const Recipe& recipe, Job like) {
  like.kind = {recipe.collective, recipe.algorithm};
  like.root = recipe.root;
  like.hosts = recipe.hosts;
  like.is_uneven = like.is_uneven && recipe.takes_uneven;
  if (like.meaning().folds_again) like.op = FoldOp::kMax;
  if (!narrow_for(like.codec, like.dtype, like.op)) like.codec = Codec::kIdentity;
  return like;
}

inline Job random_job(FakeRandom& random, uint64_t key, int size, uint64_t max_elems) {
  Job job;
  job.key = key;
  // Mostly small, some of them empty; a few large.
  job.n_elems = random.below(1 + (random.chance(0.3) ? max_elems : max_elems / 20));
  job.dtype = random.chance(0.5) ? DType::kFloat32 : DType::kInt64;
  constexpr FoldOp kOps[] = {FoldOp::kSum, FoldOp::kAvg, FoldOp::kMax};
  job.op = kOps[random.below(3)];
  job.is_uneven = random.chance(0.3);
  job.segment_bytes = random.chance(0.5) ? 64 : 256;
  job.seed = random.below(1u << 20);
  const auto& recipes = Recipes::all().of_size(size);
  job = job_of(*recipes[random.below(recipes.size())], job);
  const bool sums = job.folds() && narrow_for(Codec::kBfloat16, job.dtype, job.op).has_value();
  if (sums && job.seed % 2 == 1) job.codec = codec_of(job.seed / 2);
  if (job.seed % 3 == 1) job.subject = 1u << 24 | static_cast<Subject>(job.seed);
  return job;
}

}  // namespace shoal::test
