// Calls of workers and servers: every stripe of the workers' buffers is cut over the servers, which
// fold it and send it back. Ranks from `n_workers` on are servers.
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "test/builder.h"
#include "test/truth.h"

namespace shoal::test {

// As src/shoal/schedule/sharded.py does it: chunk s * n_servers + j is of stripe s, and server j's.
struct PoolJob {
  int n_workers = 2, n_servers = 1;
  uint64_t key = 1;
  uint64_t n_elems = 0;
  FoldOp op = FoldOp::kSum;
  uint32_t segment_bytes = 64;
  uint32_t n_lanes = 1;  // channels
  Codec codec = Codec::kIdentity;
  uint64_t seed = 0;
  Subject subject = 0;
  bool is_uneven = false;  // chunks differ in length, like those of reducers with different weights

  int size() const { return n_workers + n_servers; }
  uint32_t n_chunks() const { return static_cast<uint32_t>(n_workers * n_servers); }
  std::string descriptor() const {
    return "pool float32[" + std::to_string(n_elems) + "] of " + std::to_string(n_workers) +
           " workers and " + std::to_string(n_servers) + " servers " +
           std::to_string(static_cast<int>(op)) + "." + std::to_string(segment_bytes) + "." +
           std::to_string(n_lanes) + "." + std::to_string(static_cast<int>(codec)) +
           (is_uneven ? " in uneven chunks of seed " + std::to_string(seed) : "");
  }
  // The job by which World identifies the calls.
  Job job() const {
    Job one;
    one.key = key;
    one.n_elems = n_elems;
    one.segment_bytes = segment_bytes;
    one.subject = subject;
    return one;
  }
};

// Of a worker's buffer.
inline ChunkLayout layout_of(const PoolJob& job) {
  const uint64_t block = block_of(job.codec);
  if (!job.is_uneven) return balanced_layout(job.n_elems, sizeof(float), job.n_chunks(), block);
  FakeRandom random(job.seed + 77);
  std::vector<uint64_t> lengths(job.n_chunks());
  uint64_t left = job.n_elems;
  for (uint64_t& length : lengths) {
    const uint64_t most = random.below(std::min(left, job.n_elems / 2) + 1);
    length = &length == &lengths.back() ? left : std::min(left, (most + block - 1) / block * block);
    left -= length;
  }
  return consecutive(lengths, sizeof(float));
}

inline std::shared_ptr<Program> worker_program(const PoolJob& job, int rank) {
  const int n = job.n_workers, k = job.n_servers;
  ProgramBuilder steps(job.size());
  const auto chunk = [&](int stripe, int server) {
    return static_cast<uint32_t>((stripe + n) % n * k + server);
  };
  for (int turn = 0; turn < n; ++turn)
    for (int server = 0; server < k; ++server) steps.send(n + server, chunk(rank + turn, server));
  for (int turn = 0; turn < n; ++turn)
    for (int server = 0; server < k; ++server) steps.recv(n + server, chunk(rank - turn, server));
  return steps.done();
}

inline std::shared_ptr<Program> server_program(const PoolJob& job) {
  const int n = job.n_workers;
  ProgramBuilder steps(job.size());
  for (int turn = 0; turn < n; ++turn)
    for (int stripe = 0; stripe < n; ++stripe)
      steps.recv((stripe - turn + n) % n, static_cast<uint32_t>(stripe), turn > 0, kScratch);
  const bool finishes = job.op == FoldOp::kAvg || job.codec != Codec::kIdentity;
  for (int stripe = 0; stripe < n && finishes; ++stripe)
    steps.finish(static_cast<uint32_t>(stripe), kScratch);
  for (int turn = 0; turn < n; ++turn)
    for (int stripe = 0; stripe < n; ++stripe)
      steps.send((stripe + turn) % n, static_cast<uint32_t>(stripe), kScratch);
  return steps.done();
}

inline std::shared_ptr<Plan> plan_of(const PoolJob& job, int rank) {
  const ChunkLayout data = layout_of(job);
  Plan plan;
  plan.n_workers = static_cast<uint32_t>(job.n_workers);
  plan.n_lanes = job.n_lanes;
  plan.tensor_bytes = job.n_elems * sizeof(float);
  plan.narrow = narrow_for(job.codec, DType::kFloat32, job.op);
  if (rank < job.n_workers) {
    plan.program = worker_program(job, rank);
    plan.layout[kData] = data;
  } else {
    plan.program = server_program(job);
    std::vector<uint64_t> lengths;
    for (int stripe = 0; stripe < job.n_workers; ++stripe) {
      const auto chunk = static_cast<size_t>(stripe * job.n_servers + rank - job.n_workers);
      lengths.push_back(data.n_bytes[chunk]);
      plan.scratch_first.push_back(data.offset[chunk] / sizeof(float));
    }
    plan.layout[kScratch] = consecutive(lengths, 1);
  }
  const auto divisor = static_cast<uint32_t>(job.op == FoldOp::kAvg ? job.n_workers : 1);
  return seal(std::move(plan), DType::kFloat32, job.op, divisor,
              whole_blocks(job.segment_bytes, job.codec), job.descriptor());
}

inline std::vector<float> floats_of(const PoolJob& job, int rank) {
  FakeRandom random(job.seed * 1000 + static_cast<uint64_t>(rank));
  std::vector<float> elems(job.n_elems);
  for (float& elem : elems)
    elem = static_cast<float>(static_cast<double>(random.next() >> 40) - 8e6) *
           static_cast<float>(1u << random.below(12));
  return elems;
}

inline Bytes input_of(const PoolJob& job, int rank) { return bytes_of(floats_of(job, rank)); }

// In the order of each stripe, by a plain loop: ((f + (f-1)) + (f-2)) + ... round to f+1.
inline Bytes expected(const PoolJob& job) {
  const ChunkLayout data = layout_of(job);
  std::vector<std::vector<float>> inputs;
  for (int rank = 0; rank < job.n_workers; ++rank) {
    inputs.push_back(floats_of(job, rank));
    round_as(job.codec, inputs.back());
  }
  std::vector<float> result(job.n_elems);
  for (uint32_t chunk = 0; chunk < job.n_chunks(); ++chunk) {
    const int first = static_cast<int>(chunk) / job.n_servers;
    const uint64_t from = data.offset[chunk] / sizeof(float);
    for (uint64_t at = from; at < from + data.n_bytes[chunk] / sizeof(float); ++at) {
      float value = inputs[static_cast<size_t>(first)][at];
      for (int turn = 1; turn < job.n_workers; ++turn) {
        const auto worker = static_cast<size_t>((first - turn + job.n_workers) % job.n_workers);
        value = folded(job.op, value, inputs[worker][at]);
      }
      if (job.op == FoldOp::kAvg) value /= static_cast<float>(job.n_workers);
      result[at] = value;
    }
  }
  round_sums(job.codec, result, job.subject);
  return bytes_of(result);
}

}  // namespace shoal::test
