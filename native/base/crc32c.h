// CRC-32C (Castagnoli, reflected polynomial 0x82F63B78), the checksum of frames.
#pragma once

#include <cstddef>
#include <cstdint>

namespace shoal {

// The checksum of `n_bytes` at `data`, continued from `seed`: 0 at the start, afterwards the last
// result, so crc32c(crc32c(0, a), b) is the checksum of a followed by b.
//
// Threads: any. Source: RFC 3720 appendix B.4 (check values).
uint32_t crc32c(uint32_t seed, const void* data, size_t n_bytes);

}  // namespace shoal
