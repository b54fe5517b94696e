// A streaming copy is a copy, wherever it begins and ends.

#include <cstddef>
#include <vector>

#include "base/stream_copy.h"
#include "test/check.h"

namespace shoal::test {
namespace {

TEST("a streaming copy writes its bytes and no others, at any alignment and length") {
  constexpr size_t kRoom = 512;
  std::vector<std::byte> from(kRoom);
  for (size_t i = 0; i < kRoom; ++i) from[i] = static_cast<std::byte>(i * 7 + 1);
  for (size_t begin = 0; begin < 65; ++begin)
    for (const size_t n_bytes : {0, 1, 15, 63, 64, 65, 128, 200, 300})
      for (const size_t source : {0, 1, 16, 33}) {
        std::vector<std::byte> to(kRoom, std::byte{0xEE});
        stream_copy(to.data() + begin, from.data() + source, n_bytes);
        for (size_t i = 0; i < kRoom; ++i) {
          const bool is_inside = i >= begin && i < begin + n_bytes;
          CHECK(to[i] == (is_inside ? from[source + i - begin] : std::byte{0xEE}));
        }
      }
}

}  // namespace
}  // namespace shoal::test
