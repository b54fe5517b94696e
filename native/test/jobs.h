// Collectives to try on the engine: what each rank puts in, its plan, and what must come out.
//
// The truth is a plain loop over all ranks' inputs, in the order that the algorithm promises, so
// that floats are compared bit by bit.
#pragma once

#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "test/schedules.h"
#include "transport/fake_link.h"

namespace shoal::test {

using Bytes = std::vector<std::byte>;

// How many seeds a test tries; SHOAL_SEEDS=50 in the environment tries fifty times as many.
inline uint64_t seeds(uint64_t n) {
  const char* const factor = std::getenv("SHOAL_SEEDS");
  return factor == nullptr ? n : n * std::strtoull(factor, nullptr, 10);
}

enum class Kind {
  kDirectAllReduce,
  kShardedAllReduce,
  kRingAllReduce,
  kDirectBroadcast,
  kChainBroadcast,
  kDirectAllGather,
  kRingAllGather,
  kDirectReduceScatter,
  kRingReduceScatter,
  kKinds,
};

inline const char* name_of(Kind kind) {
  constexpr const char* kNames[] = {
      "all_reduce by direct", "all_reduce by sharded",    "all_reduce by ring",
      "broadcast by direct",  "broadcast by chain",       "all_gather by direct",
      "all_gather by ring",   "reduce_scatter by direct", "reduce_scatter by ring"};
  return kNames[static_cast<int>(kind)];
}

// One collective, the same on every rank.
struct Job {
  Kind kind = Kind::kRingAllReduce;
  uint64_t key = 0;
  uint64_t n_elems = 0;  // of the buffer in place, or of one rank's block
  DType dtype = DType::kFloat32;
  FoldOp op = FoldOp::kSum;
  int root = 0;
  uint32_t segment_bytes = 64;
  uint64_t seed = 0;  // of the data

  bool is_all_reduce() const { return kind <= Kind::kRingAllReduce; }
  bool is_broadcast() const {
    return kind == Kind::kDirectBroadcast || kind == Kind::kChainBroadcast;
  }
  bool is_all_gather() const {
    return kind == Kind::kDirectAllGather || kind == Kind::kRingAllGather;
  }
  bool is_reduce_scatter() const { return kind >= Kind::kDirectReduceScatter; }
  uint32_t n_chunks(int size) const {
    const bool whole = kind == Kind::kDirectAllReduce || is_broadcast();
    return whole ? 1 : static_cast<uint32_t>(size);
  }
  std::string descriptor() const {
    std::string text = std::string(name_of(kind)) + " " + name_of(dtype) + "[" +
                       std::to_string(n_elems) + "] " + name_of(op);
    if (is_broadcast()) text += " from rank " + std::to_string(root);
    return text;
  }
};

inline std::shared_ptr<Program> program_of(const Job& job, int rank, int size) {
  switch (job.kind) {
    case Kind::kDirectAllReduce:
      return direct_all_reduce(rank, size);
    case Kind::kShardedAllReduce:
      return sharded_all_reduce(rank, size);
    case Kind::kRingAllReduce:
      return ring_all_reduce(rank, size);
    case Kind::kDirectBroadcast:
      return direct_broadcast(rank, size, job.root);
    case Kind::kChainBroadcast:
      return chain_broadcast(rank, size, job.root);
    case Kind::kDirectAllGather:
      return direct_all_gather(rank, size);
    case Kind::kRingAllGather:
      return ring_all_gather(rank, size);
    case Kind::kDirectReduceScatter:
      return direct_reduce_scatter(rank, size);
    default:
      return ring_reduce_scatter(rank, size);
  }
}

inline std::shared_ptr<Plan> plan_of(const Job& job, int rank, int size) {
  Plan plan;
  plan.program = program_of(job, rank, size);
  const size_t item = size_of(job.dtype);
  const uint64_t block = job.n_elems * item;
  const auto n_ranks = static_cast<uint32_t>(size);
  if (job.is_all_gather()) {
    plan.layout[kInput] = equal_layout(block, 1);
    plan.layout[kOutput] = equal_layout(block, n_ranks);
  } else if (job.is_reduce_scatter()) {
    plan.layout[kInput] = equal_layout(block, n_ranks);
    plan.layout[kOutput] = equal_layout(block, 1);
    if (job.kind == Kind::kRingReduceScatter && size > 2)
      plan.layout[kScratch] = equal_layout(block, 2);
  } else {
    plan.layout[kData] = balanced_layout(job.n_elems, item, job.n_chunks(size));
    if (job.kind == Kind::kDirectAllReduce) plan.layout[kScratch] = equal_layout(block, 1);
  }
  const bool average = job.op == FoldOp::kAvg;
  return seal(std::move(plan), job.dtype, job.op, average ? n_ranks : 1, job.segment_bytes,
              job.descriptor());
}

// ---- data

inline uint64_t n_input_elems(const Job& job, int size) {
  return job.is_reduce_scatter() ? job.n_elems * static_cast<uint64_t>(size) : job.n_elems;
}

template <class T>
std::vector<T> random_elems(const Job& job, int rank, int size) {
  FakeRandom random(job.seed * 1000 + static_cast<uint64_t>(rank));
  std::vector<T> elems(n_input_elems(job, size));
  for (T& elem : elems) {
    if constexpr (std::is_floating_point_v<T>) {
      // Of many magnitudes, so that every other order of additions gives other bits.
      elem = static_cast<T>(static_cast<double>(random.next() >> 40) - 8e6) *
             static_cast<T>(1u << random.below(12));
    } else {
      elem = static_cast<T>(random.next());
    }
  }
  return elems;
}

template <class T>
T folded(FoldOp op, T a, T b) {
  if (op == FoldOp::kMax) return a > b ? a : b;
  if constexpr (std::is_integral_v<T>) {
    using U = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  } else {
    return a + b;
  }
}

// The k-th rank to be folded into the chunk (or block) `chunk`.
inline int folded_kth(const Job& job, int chunk, int k, int size) {
  switch (job.kind) {
    case Kind::kDirectAllReduce:
      return k;
    case Kind::kRingAllReduce:
      return (chunk + k) % size;
    case Kind::kRingReduceScatter:
      return (chunk + 1 + k) % size;
    default:
      return (chunk + size - k) % size;  // sharded, direct reduce_scatter
  }
}

template <class T>
std::vector<T> expected_elems(const Job& job, int rank, int size) {
  std::vector<std::vector<T>> inputs;
  for (int r = 0; r < size; ++r) inputs.push_back(random_elems<T>(job, r, size));
  if (job.is_broadcast()) return inputs[static_cast<size_t>(job.root)];
  std::vector<T> all;
  if (job.is_all_gather()) {
    for (const auto& input : inputs) all.insert(all.end(), input.begin(), input.end());
    return all;
  }
  const bool scatter = job.is_reduce_scatter();
  const uint64_t n_elems = n_input_elems(job, size);
  const uint32_t n_chunks = scatter ? static_cast<uint32_t>(size) : job.n_chunks(size);
  const ChunkLayout layout = balanced_layout(n_elems, 1, n_chunks);
  for (uint32_t chunk = 0; chunk < n_chunks; ++chunk) {
    if (scatter && static_cast<int>(chunk) != rank) continue;
    for (uint64_t at = layout.offset[chunk]; at < layout.offset[chunk] + layout.n_bytes[chunk];
         ++at) {
      T sum{};
      for (int k = 0; k < size; ++k) {
        const auto from = static_cast<size_t>(folded_kth(job, static_cast<int>(chunk), k, size));
        sum = k == 0 ? inputs[from][at] : folded(job.op, sum, inputs[from][at]);
      }
      all.push_back(job.op == FoldOp::kAvg ? static_cast<T>(sum / static_cast<T>(size)) : sum);
    }
  }
  return all;
}

template <class T>
Bytes bytes_of(const std::vector<T>& elems) {
  Bytes bytes(elems.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), elems.data(), bytes.size());
  return bytes;
}

inline Bytes input_of(const Job& job, int rank, int size) {
  return job.dtype == DType::kFloat32 ? bytes_of(random_elems<float>(job, rank, size))
                                      : bytes_of(random_elems<int64_t>(job, rank, size));
}

inline Bytes expected(const Job& job, int rank, int size) {
  return job.dtype == DType::kFloat32 ? bytes_of(expected_elems<float>(job, rank, size))
                                      : bytes_of(expected_elems<int64_t>(job, rank, size));
}

inline Job random_job(FakeRandom& random, uint64_t key, int size, uint64_t max_elems) {
  Job job;
  job.kind = static_cast<Kind>(random.below(static_cast<uint64_t>(Kind::kKinds)));
  job.key = key;
  // Mostly small, some of them empty; a few large.
  job.n_elems = random.below(1 + (random.chance(0.3) ? max_elems : max_elems / 20));
  job.dtype = random.chance(0.5) ? DType::kFloat32 : DType::kInt64;
  constexpr FoldOp kOps[] = {FoldOp::kSum, FoldOp::kAvg, FoldOp::kMax};
  job.op = kOps[random.below(3)];
  job.root = static_cast<int>(random.below(static_cast<uint64_t>(size)));
  job.segment_bytes = random.chance(0.5) ? 64 : 256;
  job.seed = random.below(1u << 20);
  return job;
}

}  // namespace shoal::test
