#include "engine/segments/program_builder.h"

#include <algorithm>

namespace shoal {
namespace {

constexpr uint32_t kNobody = ~0u;

Step step_of(StepKind kind, int peer, uint32_t chunk, int buffer, bool fold = false) {
  Step step;
  step.kind = kind;
  step.fold = fold;
  step.peer = peer;
  step.chunk = chunk;
  step.buffer = static_cast<uint8_t>(buffer);
  return step;
}

}  // namespace

ProgramBuilder::ProgramBuilder(int group_size) {
  program_->sends_to.resize(static_cast<size_t>(group_size));
  program_->recvs_from.resize(static_cast<size_t>(group_size));
}

void ProgramBuilder::send(int peer, uint32_t chunk, int buffer) {
  const Place here{buffer, chunk};
  Step step = step_of(StepKind::kSend, peer, chunk, buffer);
  const auto writer = writer_.find(here);
  const std::pair value{here, writer == writer_.end() ? kNobody : writer->second};
  step.version = versions_.emplace(value, static_cast<uint32_t>(versions_.size())).first->second;
  add(std::move(step), read(here));
}

void ProgramBuilder::recv(int peer, uint32_t chunk, bool fold, int buffer) {
  Step step = step_of(StepKind::kRecv, peer, chunk, buffer, fold);
  step.is_first = writer_.count({buffer, chunk}) == 0;
  add(std::move(step), write({buffer, chunk}));
}

void ProgramBuilder::copy(uint32_t chunk, uint32_t into, int buffer, int into_buffer, bool fold) {
  Step step = step_of(StepKind::kCopy, -1, chunk, buffer, fold);
  step.into = into;
  step.into_buffer = static_cast<uint8_t>(into_buffer);
  Numbers waits_for = read({buffer, chunk});
  for (const uint32_t before : write({into_buffer, into})) waits_for.push_back(before);
  std::sort(waits_for.begin(), waits_for.end());
  waits_for.erase(std::unique(waits_for.begin(), waits_for.end()), waits_for.end());
  add(std::move(step), std::move(waits_for));
}

void ProgramBuilder::finish(uint32_t chunk, int buffer) {
  add(step_of(StepKind::kFinish, -1, chunk, buffer), write({buffer, chunk}));
}

ProgramBuilder::Numbers ProgramBuilder::read(const Place& place) {
  readers_[place].push_back(next());
  const auto writer = writer_.find(place);
  return writer == writer_.end() ? Numbers() : Numbers{writer->second};
}

ProgramBuilder::Numbers ProgramBuilder::write(const Place& place) {
  auto readers = readers_.extract(place);
  Numbers waits_for = readers.empty() ? Numbers() : std::move(readers.mapped());
  const auto [writer, is_first] = writer_.try_emplace(place, next());
  if (waits_for.empty() && !is_first) waits_for.push_back(writer->second);
  writer->second = next();
  return waits_for;
}

void ProgramBuilder::add(Step step, Numbers waits_for) {
  for (const uint32_t before : waits_for) program_->steps[before].unlocks.push_back(next());
  step.waits_for = std::move(waits_for);
  if (step.kind == StepKind::kSend || step.kind == StepKind::kRecv) meet(step);
  program_->steps.push_back(std::move(step));
}

void ProgramBuilder::meet(Step& step) {
  Program& program = *program_;
  auto& flows = (step.kind == StepKind::kSend ? program.sends_to : program.recvs_from)[step.peer];
  step.flow = static_cast<uint32_t>(flows.size());
  flows.push_back(next());
  if (std::find(program.peers.begin(), program.peers.end(), step.peer) == program.peers.end())
    program.peers.push_back(step.peer);
  // A receive whose only predecessor is a send to the same peer needs no grant of its own: the peer
  // knows when it has consumed that send.
  if (step.kind != StepKind::kRecv || step.waits_for.size() != 1) return;
  const Step& before = program.steps[step.waits_for.front()];
  if (before.kind == StepKind::kSend && before.peer == step.peer) step.cts_flow = before.flow;
}

}  // namespace shoal
