// The input of each rank to a job, and its correct result.
//
// Integers: the collective's result by its contract (schedule/collectives.py), in a plain loop over
// all ranks' inputs; no program is used.
// Floats, whose bits depend on the order of the folds: all ranks' steps done one after the other,
// each as soon as the steps before it are, on whole chunks. The integers show that the steps
// implement the collective, the floats that the engine runs them in their order.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <vector>

#include "test/jobs.h"

namespace shoal::test {

using Bytes = std::vector<std::byte>;

template <class T>
Bytes bytes_of(const std::vector<T>& elems) {
  Bytes bytes(elems.size() * sizeof(T));
  if (!bytes.empty()) std::memcpy(bytes.data(), elems.data(), bytes.size());
  return bytes;
}

// ---- inputs

// The elements of every chunk that a rank contributes.
inline std::vector<uint64_t> input_lengths(const Job& job, int rank, int size) {
  return blocks_of(job, job.meaning().reads, rank, lengths_of(job, size));
}

template <class T>
std::vector<T> random_elems(const Job& job, int rank, int size) {
  FakeRandom random(job.seed * 1000 + static_cast<uint64_t>(rank));
  const std::vector<uint64_t> lengths = input_lengths(job, rank, size);
  std::vector<T> elems(std::accumulate(lengths.begin(), lengths.end(), uint64_t{0}));
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
using Everyone = std::vector<std::vector<T>>;  // by rank

template <class T>
Everyone<T> inputs_of(const Job& job, int size) {
  Everyone<T> inputs;
  for (int rank = 0; rank < size; ++rank) inputs.push_back(random_elems<T>(job, rank, size));
  return inputs;
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

// ---- what a collective means

// A chunk of a rank's contribution.
template <class T>
std::vector<T> chunk_of(const Job& job, const Everyone<T>& inputs, int rank, uint32_t chunk) {
  const auto lengths = input_lengths(job, rank, static_cast<int>(inputs.size()));
  const auto before = lengths.begin() + chunk;
  const auto from = inputs[static_cast<size_t>(rank)].begin() +
                    static_cast<int64_t>(std::accumulate(lengths.begin(), before, uint64_t{0}));
  return std::vector<T>(from, from + static_cast<int64_t>(lengths[chunk]));
}

template <class T>
std::vector<T> meant(const Job& job, const Everyone<T>& inputs, int rank) {
  std::vector<T> all;
  for (const Leaves& value : job.recipe(static_cast<int>(inputs.size())).leaves(rank)) {
    std::vector<T> part = chunk_of(job, inputs, value.first, value.chunk);
    for (int other = value.first + 1; other <= value.last; ++other) {
      const std::vector<T> theirs = chunk_of(job, inputs, other, value.chunk);
      for (size_t at = 0; at < part.size(); ++at) part[at] = folded(job.op, part[at], theirs[at]);
    }
    if (value.finished && job.op == FoldOp::kAvg)
      for (T& elem : part) elem = static_cast<T>(elem / static_cast<T>(inputs.size()));
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

// ---- codecs: test_codec.cc tests their values

// The elements of a whole buffer after they travelled.
inline void round_as(Codec codec, std::vector<float>& elems) {
  const auto narrow = narrow_for(codec, DType::kFloat32, FoldOp::kSum);
  if (narrow) narrow->round(*narrow, reinterpret_cast<std::byte*>(elems.data()), elems.size());
}

// Sums that begin with element `first` of a buffer, after they travelled: for an averager, in
// blocks, at random.
inline void round_sums(Codec codec, std::vector<float>& elems, Subject subject,
                       uint64_t first = 0) {
  const auto narrow = narrow_for(codec, DType::kFloat32, FoldOp::kSum);
  if (!narrow || narrow->block == 1 || subject == 0) return round_as(codec, elems);
  auto* const data = reinterpret_cast<std::byte*>(elems.data());
  narrow->round_stochastic(*narrow, data, elems.size(), subject, first);
}

// ---- the order of the steps

// Runs all ranks' programs; data in flight is only in queues.
template <class T>
class InOrder {
 public:
  InOrder(const Job& job, const Everyone<T>& inputs) : job_(job) {
    const auto size = static_cast<int>(inputs.size());
    for (int rank = 0; rank < size; ++rank) {
      Side& side = sides_.emplace_back();
      side.plan = plan_of(job, rank, size);
      side.done.resize(side.plan->program->steps.size());
      for (int buffer = 0; buffer < kBuffers; ++buffer)
        for (const uint64_t n_bytes : side.plan->layout[buffer].n_bytes)
          side.chunks[buffer].emplace_back(n_bytes / sizeof(T));
      auto from = inputs[static_cast<size_t>(rank)].begin();
      for (auto& chunk : side.chunks[job.has_blocks() ? kInput : kData])
        for (T& elem : chunk) elem = *from++;
    }
    while (turn()) {
    }
  }
  std::vector<T> result(int rank) const {
    const Side& side = sides_[static_cast<size_t>(rank)];
    std::vector<T> all;
    for (const bool done : side.done)
      if (!done) throw std::runtime_error(job_.descriptor() + " does not come to its end");
    for (const auto& chunk : side.chunks[job_.has_blocks() ? kOutput : kData])
      all.insert(all.end(), chunk.begin(), chunk.end());
    return all;
  }

 private:
  struct Side {
    std::shared_ptr<const Plan> plan;
    std::vector<bool> done;
    std::vector<std::vector<T>> chunks[kBuffers];
  };

  bool turn() {
    bool moved = false;
    for (size_t rank = 0; rank < sides_.size(); ++rank) {
      Side& side = sides_[rank];
      for (size_t at = 0; at < side.done.size(); ++at) {
        if (side.done[at] || !runs(static_cast<int>(rank), side, at)) continue;
        side.done[at] = moved = true;
      }
    }
    return moved;
  }
  bool runs(int rank, Side& side, size_t at) {
    const Step& step = side.plan->program->steps[at];
    for (const uint32_t before : step.waits_for)
      if (!side.done[before]) return false;
    std::vector<T>& here = side.chunks[step.buffer][step.chunk];
    switch (step.kind) {
      case StepKind::kSend:
        on_way_[{rank, step.peer, step.flow}] = here;
        if (is_narrow(rank, step)) round(on_way_[{rank, step.peer, step.flow}]);
        return true;
      case StepKind::kRecv: {
        const auto come = on_way_.find({step.peer, rank, step.flow});
        if (come == on_way_.end()) return false;
        put(come->second, step.fold, here);
        return true;
      }
      case StepKind::kCopy:
        put(here, step.fold, side.chunks[step.into_buffer][step.into]);
        return true;
      case StepKind::kFinish:
        for (T& elem : here) elem = static_cast<T>(elem / static_cast<T>(side.plan->divisor));
        if (leaves_narrow(rank, side, step)) round(here, job_.subject, first_elem(side, step));
        return true;
    }
    return false;
  }
  bool is_narrow(int rank, const Step& step) const {
    return step.kind == StepKind::kSend && job_.codec != Codec::kIdentity &&
           job_.is_far(rank, step.peer);
  }
  bool leaves_narrow(int rank, const Side& side, const Step& step) const {
    return std::any_of(step.unlocks.begin(), step.unlocks.end(), [&](uint32_t next) {
      return is_narrow(rank, side.plan->program->steps[next]);
    });
  }
  static uint64_t first_elem(const Side& side, const Step& step) {
    if (step.buffer == kScratch) return side.plan->scratch_first[step.chunk];
    return side.plan->layout[step.buffer].offset[step.chunk] / sizeof(T);
  }
  void round(std::vector<T>& elems, Subject subject = 0, uint64_t first = 0) const {
    if constexpr (std::is_same_v<T, float>) round_sums(job_.codec, elems, subject, first);
  }
  void put(const std::vector<T>& from, bool fold, std::vector<T>& into) const {
    if (from.size() != into.size())
      throw std::runtime_error(job_.descriptor() + ": chunks of one value differ in length");
    for (size_t at = 0; at < into.size(); ++at)
      into[at] = fold ? folded(job_.op, into[at], from[at]) : from[at];
  }

  const Job job_;
  std::vector<Side> sides_;
  std::map<std::tuple<int, int, uint32_t>, std::vector<T>> on_way_;
};

// ---- both

inline Bytes input_of(const Job& job, int rank, int size) {
  return job.dtype == DType::kFloat32 ? bytes_of(random_elems<float>(job, rank, size))
                                      : bytes_of(random_elems<int64_t>(job, rank, size));
}

inline std::vector<Bytes> expected_of_all(const Job& job, int size) {
  std::vector<Bytes> all;
  if (job.dtype == DType::kFloat32) {
    const InOrder<float> run(job, inputs_of<float>(job, size));
    for (int rank = 0; rank < size; ++rank) all.push_back(bytes_of(run.result(rank)));
  } else {
    const auto inputs = inputs_of<int64_t>(job, size);
    for (int rank = 0; rank < size; ++rank) all.push_back(bytes_of(meant(job, inputs, rank)));
  }
  return all;
}

// Keeps the last few results, since tests ask for one rank after the other.
inline const Bytes& expected(const Job& job, int rank, int size) {
  struct Kept {
    Job job;
    int size;
    std::vector<Bytes> all;
  };
  thread_local std::deque<Kept> kept;
  for (const Kept& one : kept)
    if (one.job == job && one.size == size) return one.all[static_cast<size_t>(rank)];
  if (kept.size() == 16) kept.pop_front();
  kept.push_back({job, size, expected_of_all(job, size)});
  return kept.back().all[static_cast<size_t>(rank)];
}

}  // namespace shoal::test
