#include "engine/segments/program.h"

#include <algorithm>

namespace shoal {
namespace {

bool has_chunks(const Plan& plan, const Step& step) {
  const auto has = [&](int buffer, uint32_t chunk) {
    const ChunkLayout& layout = plan.layout[buffer];
    return chunk < layout.n_bytes.size() && chunk < layout.offset.size();
  };
  return has(step.buffer, step.chunk) &&
         (step.kind != StepKind::kCopy || has(step.into_buffer, step.into));
}

bool gives_a_result(const Step& step) { return !step.fold && step.buffer == 0; }

}  // namespace

std::string Plan::flaw() const {
  if (divisor == 0 || n_lanes == 0) return "a plan needs a divisor and a lane";
  if (segment_bytes % 1024 != 0 || segment_bytes == 0 || segment_bytes > kSegmentBytes)
    return "segments must be whole KiB, at most SEGMENT_BYTES";
  if (rounds_own && !narrow) return "a plan that rounds its own parts needs a narrow codec";
  if (narrow) {
    const size_t n_block_bytes = narrow->block * size_of(dtype);
    if (segment_bytes % n_block_bytes != 0) return "segments must be whole blocks of the codec";
    for (size_t chunk = 0; chunk < layout[0].offset.size(); ++chunk)
      if (layout[0].offset[chunk] % n_block_bytes != 0 && layout[0].n_bytes[chunk] > 0)
        return "chunks must begin at a block of the codec";
  }
  if (n_workers > program->sends_to.size())
    return "a plan must have no more workers than its group has ranks";
  for (const Step& step : program->steps) {
    if (!has_chunks(*this, step)) return "a step names a chunk that the layout does not have";
    if (step.kind == StepKind::kRecv && is_server(step.peer) && !gives_a_result(step))
      return "a chunk from a server is a result, and must be stored in DATA";
  }
  const auto is_several = [](const std::vector<uint32_t>& flows) { return flows.size() > 1; };
  for (const auto* flows : {&program->sends_to, &program->recvs_from})
    if (by_pair && std::any_of(flows->begin(), flows->end(), is_several))
      return "lengths by pair of ranks allow at most one flow each way";
  return "";
}

void Plan::index() {
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

uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, then a mix so that all 64 bits depend on the end
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  hash ^= hash >> 32;
  hash *= 0x9e3779b97f4a7c15;
  return hash ^ (hash >> 29);
}

}  // namespace shoal
