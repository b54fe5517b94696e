#include "engine/program.h"

#include <algorithm>

namespace shoal {

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

uint64_t hash_of(const std::string& text) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a, then a mix so that all 64 bits depend on the end
  for (const char c : text) hash = (hash ^ static_cast<uint8_t>(c)) * 0x100000001b3;
  hash ^= hash >> 32;
  hash *= 0x9e3779b97f4a7c15;
  return hash ^ (hash >> 29);
}

}  // namespace shoal
