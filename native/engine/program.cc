#include "engine/program.h"

#include <algorithm>

namespace shoal {

void Program::index(int group_size) {
  peers.clear();
  sends_to.assign(static_cast<size_t>(group_size), {});
  recvs_from.assign(static_cast<size_t>(group_size), {});
  n_versions = 0;
  for (Step& step : steps) step.unlocks.clear();
  for (uint32_t at = 0; at < steps.size(); ++at) {
    Step& step = steps[at];
    for (const uint32_t before : step.waits_for) steps[before].unlocks.push_back(at);
    if (step.kind != StepKind::kSend && step.kind != StepKind::kRecv) continue;
    auto& flows = (step.kind == StepKind::kSend ? sends_to : recvs_from)[step.peer];
    step.flow = static_cast<uint32_t>(flows.size());
    flows.push_back(at);
    n_versions = std::max(n_versions, step.version + 1);
    if (std::find(peers.begin(), peers.end(), step.peer) == peers.end()) peers.push_back(step.peer);
  }
  // A receive whose only predecessor is a send to the same peer needs no word of its own about
  // being ready: the peer knows when it has consumed that send.
  for (Step& step : steps) {
    step.gate = ~0u;
    if (step.kind != StepKind::kRecv || step.waits_for.size() != 1) continue;
    const Step& before = steps[step.waits_for.front()];
    if (before.kind == StepKind::kSend && before.peer == step.peer) step.gate = before.flow;
  }
}

void Plan::index() {
  segment_bytes = segment_elems * static_cast<uint32_t>(size_of(dtype));
  const ChunkLayout& scratch = layout[kScratch];
  for (size_t chunk = 0; chunk < scratch.n_bytes.size(); ++chunk)
    scratch_bytes = std::max(scratch_bytes, scratch.offset[chunk] + scratch.n_bytes[chunk]);
  const auto frames = [&](uint32_t at) { return 2 + n_segments(program->steps[at]) / 4; };
  for (const int peer : program->peers) {
    uint32_t to_peer = 1;
    for (const uint32_t at : program->sends_to[peer]) to_peer += frames(at);
    for (const uint32_t at : program->recvs_from[peer]) to_peer += frames(at);
    frames_ahead = std::max(frames_ahead, to_peer);
  }
}

std::shared_ptr<Program> idle(int group_size) {
  auto program = std::make_shared<Program>();
  program->index(group_size);
  return program;
}

std::shared_ptr<Program> receive_from(int source, int group_size) {
  auto program = std::make_shared<Program>();
  Step step;
  step.kind = StepKind::kRecv;
  step.peer = source;
  program->steps.push_back(std::move(step));
  program->index(group_size);
  return program;
}

uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, then a mix so that all 64 bits depend on the end
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  hash ^= hash >> 32;
  hash *= 0x9e3779b97f4a7c15;
  return hash ^ (hash >> 29);
}

}  // namespace shoal
