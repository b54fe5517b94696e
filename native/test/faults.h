// Shared by tests of faults: a call that does not end at once, a rough network, and a search in
// error texts.
#pragma once

#include <string>
#include <vector>

#include "test/check.h"
#include "test/world.h"

namespace shoal::test {

inline bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

inline Job large(Kind kind = Kind::kRingAllReduce, uint64_t n_elems = 3000) {
  Job job;
  job.kind = kind;
  job.n_elems = n_elems;
  return job;
}

// Every call that succeeded has the right result, whatever happened to the others.
inline void check_no_wrong_result(const std::vector<TestCall*>& calls, const World& world,
                                  uint64_t seed) {
  for (size_t at = 0; at < calls.size(); ++at) {
    const TestCall& call = *calls[at];
    const int rank = static_cast<int>(at) % world.size();
    if (call.ok() && call.result != expected(call.job, rank, world.size()))
      fail(__FILE__, __LINE__, "seed " + std::to_string(seed) + ": a wrong result and no error");
  }
}

inline World::Options options_for(uint64_t seed) {
  World::Options options;
  options.net.seed = seed;
  options.net.shares_memory = seed % 2 == 1;
  options.net.max_inline = seed / 2 % 2 == 0 ? 64 : 1024;
  options.net.copied = 32;
  options.net.delays = options.net.splits = options.net.reads_late = options.net.reports_late = 0.2;
  options.net.moves_late = options.net.releases_late = 0.4;
  return options;
}

}  // namespace shoal::test
