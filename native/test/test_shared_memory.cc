#include <sys/time.h>

#include <csignal>
#include <cstring>

#include "base/shared_memory.h"
#include "check.h"

using namespace shoal;

namespace {

constexpr size_t kPage = 4096;

struct Shared {  // a region, and a peer's mapping of it
  explicit Shared(size_t n_bytes) {
    CHECK(!Regions::of_process().allocate(n_bytes, region));
    CHECK(!Mapping::map(region.fd, region.size, peer));
  }
  ~Shared() { Regions::of_process().release(region.data); }
  Regions::Region region;
  Mapping peer;
};

}  // namespace

TEST("a region is found by any address inside it and by no other") {
  Shared shared(10'000);
  Regions& regions = Regions::of_process();
  CHECK_EQ(regions.find(shared.region.data, 10'000).id, shared.region.id);
  CHECK_EQ(regions.find(shared.region.data + 9'999, 1).id, shared.region.id);
  CHECK_EQ(regions.find(shared.region.data, shared.region.size + 1).id, 0u);
  CHECK_EQ(regions.find(shared.region.data - 1, 1).id, 0u);
}

TEST("a released region is gone, and its id is not given out again") {
  uint32_t id = 0;
  {
    Shared shared(100);
    id = shared.region.id;
  }
  CHECK_EQ(Regions::of_process().with_id(id).id, 0u);
  Shared next(100);
  CHECK(next.region.id > id);
}

TEST("after a fence a peer's writes no longer reach those pages, and their contents stay") {
  Shared shared(4 * kPage);
  std::memset(shared.region.data, 1, 4 * kPage);
  Regions::of_process().fence(shared.region.data + kPage + 10, kPage);  // on pages 1 and 2
  std::memset(shared.peer.data(), 9, 4 * kPage);
  CHECK_EQ(static_cast<int>(shared.region.data[kPage - 1]), 9);
  for (size_t at = kPage; at < 3 * kPage; ++at)
    CHECK_EQ(static_cast<int>(shared.region.data[at]), 1);
  CHECK_EQ(static_cast<int>(shared.region.data[3 * kPage]), 9);
}

TEST("a fenced region is not shared again") {
  Shared shared(2 * kPage);
  Regions::of_process().fence(shared.region.data, 1);
  CHECK_EQ(Regions::of_process().find(shared.region.data, 1).id, 0u);
  CHECK_EQ(Regions::of_process().with_id(shared.region.id).id, 0u);
  Regions::of_process().fence(shared.region.data, 2 * kPage);  // once more does no harm
}

TEST("a chunk is alone on its pages only if the rest of them is its call's or nobody's") {
  Shared shared(2 * kPage + 100);
  const std::byte* base = shared.region.data;
  const auto alone = [&](size_t from, size_t n, size_t lo, size_t hi) {
    return Regions::alone_on_pages(shared.region, base + from, n, base + lo, base + hi);
  };
  CHECK(alone(0, 2 * kPage + 100, 0, 2 * kPage + 100));  // all of it, and the unused tail
  CHECK(alone(100, 50, 0, kPage));                       // neighbours belong to the call
  CHECK(!alone(100, 50, 100, kPage));                    // the bytes before do not
  CHECK(!alone(kPage, 50, kPage, kPage + 60));           // nor those behind
  CHECK(!alone(2 * kPage, 50, 0, 2 * kPage + 50));       // nor the rest of what was asked for
  CHECK(alone(2 * kPage, 50, 2 * kPage, 2 * kPage + 100));
}

TEST("a request beyond all memory is refused and says how much was asked for") {
  Regions::Region region;
  const Error error = Regions::of_process().allocate(size_t{1} << 50, region);
  CHECK(error.fault == Fault::kResource);
  CHECK(error.text.find("1125899906842624 B") != std::string::npos);
}

TEST("memory is reserved also while signals come") {
  struct sigaction action{}, before{};
  action.sa_handler = [](int) {};
  sigaction(SIGALRM, &action, &before);
  const itimerval often = {{0, 500}, {0, 500}};
  setitimer(ITIMER_REAL, &often, nullptr);
  Regions::Region region;
  const Error error = Regions::of_process().allocate(256u << 20, region);
  const itimerval never = {};
  setitimer(ITIMER_REAL, &never, nullptr);
  sigaction(SIGALRM, &before, nullptr);
  CHECK_EQ(error.text, "");
  if (!error) Regions::of_process().release(region.data);
}
