// CRC-32C by the SSE4.2 instruction, three streams at a time.
//
// The instruction takes 8 bytes a cycle but answers after three, so three thirds of a block are run
// side by side and then joined: the register of a third is shifted over the thirds behind it, a
// linear map that four table look-ups apply.
// Source: V. Gopal et al., "Fast CRC Computation for iSCSI Polynomial Using CRC32 Instruction",
// Intel 2011. NOTHING of std that emits code is called here: see fold/loops.h.

#include <nmmintrin.h>

#include "base/crc32c_kernels.h"

namespace shoal {
namespace {

// Bytes of a third. Long: joining costs nothing against 6 KiB (4096 and 1024 measure alike).
// Short: for the tail of a long run and for small frames; below 3 * 128 one stream is as fast.
constexpr size_t kLong = 2048;
constexpr size_t kShort = 128;

// The register after n more zero bytes, as a sum over its four bytes.
struct Shift {
  uint32_t of_byte[4][256];
};

constexpr uint32_t after_zeros(uint32_t crc, size_t n_bytes) {
  for (size_t bit = 0; bit < 8 * n_bytes; ++bit) crc = (crc >> 1) ^ ((crc & 1) * kCastagnoli);
  return crc;
}

constexpr Shift shift_over(size_t n_bytes) {
  uint32_t of_bit[32] = {};
  of_bit[31] = after_zeros(0x80000000U, n_bytes);
  // A lower bit is the next higher one, one zero bit later.
  for (int bit = 30; bit >= 0; --bit) {
    of_bit[bit] = (of_bit[bit + 1] >> 1) ^ ((of_bit[bit + 1] & 1) * kCastagnoli);
  }
  Shift shift{};
  for (size_t place = 0; place < 4; ++place) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      for (size_t bit = 0; bit < 8; ++bit) {
        if ((byte >> bit) & 1) shift.of_byte[place][byte] ^= of_bit[8 * place + bit];
      }
    }
  }
  return shift;
}

constexpr Shift kOverLong = shift_over(kLong);
constexpr Shift kOverShort = shift_over(kShort);

uint64_t shifted(const Shift& over, uint64_t crc) {
  return over.of_byte[0][crc & 0xff] ^ over.of_byte[1][(crc >> 8) & 0xff] ^
         over.of_byte[2][(crc >> 16) & 0xff] ^ over.of_byte[3][(crc >> 24) & 0xff];
}

uint64_t word_at(const std::byte* from) {
  uint64_t word;
  __builtin_memcpy(&word, from, sizeof word);
  return word;
}

template <size_t kThird>
uint64_t three_streams(const Shift& over, uint64_t crc, const std::byte* from) {
  uint64_t second = 0;
  uint64_t third = 0;
  for (const std::byte* const end = from + kThird; from < end; from += 8) {
    crc = _mm_crc32_u64(crc, word_at(from));
    second = _mm_crc32_u64(second, word_at(from + kThird));
    third = _mm_crc32_u64(third, word_at(from + 2 * kThird));
  }
  return shifted(over, shifted(over, crc) ^ second) ^ third;
}

}  // namespace

uint32_t crc32c_sse42(uint32_t crc, const std::byte* from, size_t n_bytes) {
  uint64_t wide = crc;
  for (; n_bytes >= 3 * kLong; n_bytes -= 3 * kLong, from += 3 * kLong) {
    wide = three_streams<kLong>(kOverLong, wide, from);
  }
  for (; n_bytes >= 3 * kShort; n_bytes -= 3 * kShort, from += 3 * kShort) {
    wide = three_streams<kShort>(kOverShort, wide, from);
  }
  for (; n_bytes >= 8; n_bytes -= 8, from += 8) wide = _mm_crc32_u64(wide, word_at(from));
  auto narrow = static_cast<uint32_t>(wide);
  for (; n_bytes > 0; --n_bytes, ++from) {
    narrow = _mm_crc32_u8(narrow, static_cast<uint8_t>(*from));
  }
  return narrow;
}

}  // namespace shoal
