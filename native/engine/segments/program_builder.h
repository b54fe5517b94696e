// Builds a rank's program from its steps in order. Dependencies follow from the chunks that steps
// touch, by the rules of src/shoal/schedule/steps.py.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "engine/segments/program.h"

namespace shoal {

// Peers must be below `group_size` and buffers below kBuffers; the caller checks.
class ProgramBuilder {
 public:
  explicit ProgramBuilder(int group_size);

  void send(int peer, uint32_t chunk, int buffer = 0);
  void recv(int peer, uint32_t chunk, bool fold = false, int buffer = 0);
  void copy(uint32_t chunk, uint32_t into, int buffer, int into_buffer, bool fold = false);
  void finish(uint32_t chunk, int buffer = 0);
  std::shared_ptr<Program> done() { return program_; }

  int group_size() const { return static_cast<int>(program_->sends_to.size()); }

 private:
  using Place = std::pair<int, uint32_t>;  // buffer and chunk
  using Numbers = std::vector<uint32_t>;

  uint32_t next() const { return static_cast<uint32_t>(program_->steps.size()); }
  Numbers read(const Place& place);   // the step that wrote it last
  Numbers write(const Place& place);  // the steps that read that value, or else its writer
  void add(Step step, Numbers waits_for);
  void meet(Step& step);

  std::shared_ptr<Program> program_ = std::make_shared<Program>();
  std::map<Place, uint32_t> writer_;
  std::map<Place, Numbers> readers_;
  std::map<std::pair<Place, uint32_t>, uint32_t> versions_;  // by place and by its writer
};

}  // namespace shoal
