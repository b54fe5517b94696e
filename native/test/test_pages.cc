// A kernel with pages of 64 KiB, as on some ARM machines: calls that it rejects are rejected here.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/shared_memory.h"
#include "test/check.h"
#include "transport/arena.h"

namespace {

constexpr size_t kPage = 64u << 10;

void* map(void* at, size_t n_bytes, int protection, int flags, int fd, off_t offset) {
  return reinterpret_cast<void*>(syscall(SYS_mmap, at, n_bytes, protection, flags, fd, offset));
}

}  // namespace

// Replaces the C library's function.
extern "C" long sysconf(int name) noexcept {
  if (name == _SC_PAGESIZE) return kPage;
  using Sysconf = long (*)(int);
  static const auto real = reinterpret_cast<Sysconf>(dlsym(RTLD_NEXT, "sysconf"));
  return real(name);
}

extern "C" void* mmap(void* at, size_t n_bytes, int protection, int flags, int fd,
                      off_t offset) noexcept {
  const bool is_fixed = (flags & MAP_FIXED) != 0;
  if (offset % kPage != 0 || (is_fixed && reinterpret_cast<uintptr_t>(at) % kPage != 0)) {
    errno = EINVAL;
    return MAP_FAILED;
  }
  if (is_fixed) return map(at, n_bytes, protection, flags, fd, offset);
  // The memory before and after the whole pages stays unused.
  void* room = map(nullptr, n_bytes + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED) return room;
  auto* const first = static_cast<std::byte*>(room);
  auto* const page = first + (kPage - reinterpret_cast<uintptr_t>(first) % kPage) % kPage;
  return map(page, n_bytes, protection, flags | MAP_FIXED, fd, offset);
}

namespace shoal::test {
namespace {

TEST("the ranks of a host enter their arenas and reserve slots") {
  Arena first, second, third;
  CHECK_EQ(Arena::create(3, first).text, "");
  CHECK_EQ(Arena::enter(dup(first.memory_fd()), 3, 1, second).text, "");
  CHECK_EQ(Arena::enter(dup(first.memory_fd()), 3, 2, third).text, "");
  CHECK_EQ(third.reserve_slot(third.n_slots() - 1).text, "");
  third.slots()[third.n_slots() * Slots::kSlotBytes - 1] = std::byte{7};
  for (int local = 0; local < 2; ++local) {
    ArenaView mate;
    CHECK_EQ(third.mate(local, mate).text, "");
    CHECK(mate.header().life.load() != 0);
    CHECK(!mate.has_died());
  }
}

TEST("the rings of an arena do not overlap its stamps or its slots") {
  Arena own;
  CHECK_EQ(Arena::create(4, own).text, "");
  const auto* const stamps_end = reinterpret_cast<std::byte*>(own.stamps() + own.n_slots());
  CHECK(stamps_end <= reinterpret_cast<std::byte*>(&own.ring(0)));
  CHECK(own.ring_data(3) + own.ring_bytes() <= own.slots());
  CHECK_EQ(reinterpret_cast<uintptr_t>(own.slots()) % kPage, 0u);
}

TEST("a fence takes the whole pages of a range away from a peer") {
  Regions& regions = Regions::of_process();
  Regions::Region region;
  CHECK_EQ(regions.allocate(4 * kPage - 100, region).text, "");
  CHECK_EQ(region.size, 4 * kPage);
  Mapping peer;
  CHECK_EQ(Mapping::map(region.fd, region.size, peer).text, "");
  std::memset(region.data, 1, region.size);
  // 4 KiB into the second page, which must be copied, and the third page, which need not be.
  const Error error =
      regions.fence(region.data + kPage + 4096, 2 * kPage - 4096, Regions::Against::kWrites);
  CHECK_EQ(error.text, "");
  std::memset(peer.data(), 9, peer.size());
  // This kernel may copy 4 KiB of a page where one with larger pages copies all of it.
  const auto holds = [&](size_t page, int value) {
    return region.data[page * kPage] == std::byte(value);
  };
  CHECK(holds(0, 9));
  CHECK(holds(1, 1));
  CHECK(holds(2, 0));
  CHECK(holds(3, 9));
  regions.release(region.data);
}

TEST("memory that shares a page with another buffer cannot be fenced") {
  Regions& regions = Regions::of_process();
  Regions::Region region;
  CHECK_EQ(regions.allocate(2 * kPage, region).text, "");
  region.shared_upto = region.data + region.size;
  const std::byte* const data = region.data;
  CHECK(!Regions::alone_on_pages(region, data + 4096, 4096, data + 4096, data + 8192));
  CHECK(Regions::alone_on_pages(region, data + kPage, kPage, data + kPage, data + 2 * kPage));
  regions.release(region.data);
}

}  // namespace
}  // namespace shoal::test
