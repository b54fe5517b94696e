#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <memory>

#include "base/page.h"
#include "base/shared_memory.h"
#include "check.h"

using namespace shoal;

namespace {

const size_t kPage = page_bytes();

struct Shared {  // a region, and a peer's mapping of it
  explicit Shared(size_t n_bytes) {
    CHECK(!Regions::of_process().allocate(n_bytes, region));
    CHECK(!Mapping::map(region.fd, region.size, peer));
  }
  ~Shared() { Regions::of_process().release(region.data); }
  // True if the owner sees this value in all of [from, upto).
  bool holds(size_t from, size_t upto, int value) const {
    return std::all_of(region.data + from, region.data + upto,
                       [&](std::byte byte) { return byte == std::byte(value); });
  }
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

TEST("a released region is gone, and its id is not reused") {
  uint32_t id = 0;
  {
    Shared shared(100);
    id = shared.region.id;
  }
  CHECK_EQ(Regions::of_process().with_id(id).id, 0u);
  Shared next(100);
  CHECK(next.region.id > id);
}

TEST("after a fence against writes a peer's writes no longer reach those pages") {
  Shared shared(5 * kPage);
  std::memset(shared.region.data, 1, 5 * kPage);
  // On pages 1 to 3: the end of the first, the second whole, the beginning of the third.
  CHECK(!Regions::of_process().fence(shared.region.data + 2 * kPage - 10, kPage + 20,
                                     Regions::Against::kWrites));
  std::memset(shared.peer.data(), 9, 5 * kPage);
  CHECK(shared.holds(0, kPage, 9));
  CHECK(shared.holds(kPage, 2 * kPage, 1));      // not all of this page was to be written
  CHECK(shared.holds(2 * kPage, 3 * kPage, 0));  // all of this one was, so it need not be copied
  CHECK(shared.holds(3 * kPage, 4 * kPage, 1));
  CHECK(shared.holds(4 * kPage, 5 * kPage, 9));
}

TEST("after a fence against reads both the peer and the owner keep the contents") {
  Shared shared(3 * kPage);
  std::memset(shared.region.data, 1, 3 * kPage);
  CHECK(!Regions::of_process().fence(shared.region.data + kPage, 1, Regions::Against::kReads));
  CHECK(shared.holds(0, 3 * kPage, 1));
  std::memset(shared.region.data, 2, 3 * kPage);
  CHECK(shared.peer.data()[0] == std::byte{2});
  CHECK(shared.peer.data()[kPage] == std::byte{1});
  CHECK(shared.peer.data()[2 * kPage - 1] == std::byte{1});
  CHECK(shared.peer.data()[2 * kPage] == std::byte{2});
}

TEST("a fenced page is not shared again, and the rest of its region is unchanged") {
  Shared shared(4 * kPage);
  Regions& regions = Regions::of_process();
  std::byte* const data = shared.region.data;
  CHECK(!regions.fence(data + kPage, 1, Regions::Against::kWrites));
  CHECK_EQ(regions.with_id(shared.region.id).id, shared.region.id);
  CHECK_EQ(regions.find(data, kPage).id, shared.region.id);
  CHECK(regions.find(data + 10, 1).shared_upto == data + kPage);
  CHECK_EQ(regions.find(data, kPage + 1).id, 0u);
  CHECK_EQ(regions.find(data + 2 * kPage - 1, 1).id, 0u);
  CHECK_EQ(regions.find(data + 2 * kPage, 2 * kPage).id, shared.region.id);
  CHECK(regions.find(data + 2 * kPage, 1).shared_upto == data + 4 * kPage);
  CHECK(regions.whole(data + kPage).shared_upto == data + 4 * kPage);
}

TEST("overlapping fences leave fenced pages alone") {
  Shared shared(6 * kPage);
  Regions& regions = Regions::of_process();
  std::byte* const data = shared.region.data;
  CHECK(!regions.fence(data + 1 * kPage, kPage, Regions::Against::kReads));
  CHECK(!regions.fence(data + 3 * kPage, kPage, Regions::Against::kReads));
  std::memset(data, 5, 6 * kPage);
  CHECK(!regions.fence(data, 4 * kPage, Regions::Against::kReads));
  CHECK(!regions.fence(data + kPage, 2 * kPage, Regions::Against::kWrites));
  CHECK(shared.holds(0, 6 * kPage, 5));
  std::memset(shared.peer.data(), 9, 6 * kPage);
  CHECK(shared.holds(kPage, 2 * kPage, 5));
  CHECK(shared.holds(3 * kPage, 4 * kPage, 5));
  CHECK(shared.holds(4 * kPage, 6 * kPage, 9));
  CHECK_EQ(regions.find(data + 3 * kPage, 1).id, 0u);
  CHECK_EQ(regions.find(data + 4 * kPage, 2 * kPage).id, shared.region.id);
}

TEST("a fence that begins inside another covers the pages after it") {
  Shared shared(6 * kPage);
  Regions& regions = Regions::of_process();
  std::byte* const data = shared.region.data;
  CHECK(!regions.fence(data + kPage, 3 * kPage, Regions::Against::kReads));
  CHECK(!regions.fence(data + 2 * kPage, kPage, Regions::Against::kReads));
  CHECK(!regions.fence(data + 3 * kPage, 2 * kPage, Regions::Against::kReads));
  CHECK_EQ(regions.find(data, kPage).id, shared.region.id);
  for (size_t page = 1; page < 5; ++page) CHECK_EQ(regions.find(data + page * kPage, 1).id, 0u);
  CHECK_EQ(regions.find(data + 5 * kPage, kPage).id, shared.region.id);
}

TEST("a fence that the kernel refuses is an error, and memory outside regions needs no fence") {
  Shared shared(2 * kPage);
  const int spare = dup(shared.region.fd);
  close(shared.region.fd);
  const Error error = Regions::of_process().fence(shared.region.data, 1, Regions::Against::kWrites);
  CHECK(error.fault == Fault::kResource);
  CHECK(error.text.find("vm.max_map_count") != std::string::npos);
  dup2(spare, shared.region.fd);
  close(spare);
  const auto heap = std::make_unique<std::byte[]>(kPage);
  CHECK(!Regions::of_process().fence(heap.get(), kPage, Regions::Against::kWrites));
}

TEST("a forked child reads the contents, and its writes stay its own") {
  Shared shared(3 * kPage);
  Regions& regions = Regions::of_process();
  std::memset(shared.region.data, 1, 3 * kPage);
  CHECK(!regions.fence(shared.region.data + kPage, kPage, Regions::Against::kReads));
  std::memset(shared.region.data + kPage, 2, kPage);
  const pid_t child = fork();
  if (child == 0) {
    const bool sees = shared.holds(0, kPage, 1) && shared.holds(kPage, 2 * kPage, 2);
    std::memset(shared.region.data, 3, 3 * kPage);
    const bool unshared = regions.find(shared.region.data, 1).id == 0;
    regions.release(shared.region.data);
    _exit(sees && unshared ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK_EQ(status, 0);
  CHECK(shared.holds(0, kPage, 1));
  CHECK(shared.holds(kPage, 2 * kPage, 2));
  CHECK(shared.holds(2 * kPage, 3 * kPage, 1));
  CHECK(shared.peer.data()[0] == std::byte{1});
  CHECK_EQ(regions.find(shared.region.data, 1).id, shared.region.id);
}

TEST("a chunk is alone on its pages only if their rest is its call's or unused") {
  Shared shared(2 * kPage + 100);
  const std::byte* base = shared.region.data;
  const auto alone = [&](size_t from, size_t n, size_t lo, size_t hi) {
    return Regions::alone_on_pages(shared.region, base + from, n, base + lo, base + hi);
  };
  CHECK(alone(0, 2 * kPage + 100, 0, 2 * kPage + 100));  // all of it, and the unused tail
  CHECK(alone(100, 50, 0, kPage));                       // neighbours belong to the call
  CHECK(!alone(100, 50, 100, kPage));                    // the bytes before do not
  CHECK(!alone(kPage, 50, kPage, kPage + 60));           // nor the bytes after it
  CHECK(!alone(2 * kPage, 50, 0, 2 * kPage + 50));       // nor the rest of the request
  CHECK(alone(2 * kPage, 50, 2 * kPage, 2 * kPage + 100));
}

TEST("a request beyond all memory is refused with its size in the error") {
  Regions::Region region;
  const Error error = Regions::of_process().allocate(size_t{1} << 50, region);
  CHECK(error.fault == Fault::kResource);
  CHECK(error.text.find("1125899906842624 B") != std::string::npos);
}

TEST("memory is reserved even while signals arrive") {
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
