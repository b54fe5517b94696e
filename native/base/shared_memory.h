// Shared memory without names: sealed memfds, which vanish with the last process however it dies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "base/error.h"

namespace shoal {

// An owned mmap of a whole memfd.
class Mapping {
 public:
  Mapping() = default;
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    swap(other);
    return *this;
  }
  ~Mapping();

  // Maps `n_bytes` of `fd`, readable and writable. The caller keeps `fd`.
  static Error map(int fd, size_t n_bytes, Mapping& out);

  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  void swap(Mapping& other) {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
  }
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// True if that much memory is left. A memfd has no limit of its own: a request for more than is
// available would not fail but wake the out-of-memory killer.
Error check_shared_memory_fits(size_t n_bytes);

// A new memfd of `n_bytes`, sealed against resizing, whose memory must be reserved before it is
// used. Returns the descriptor in `fd_out`.
Error create_shared_memory(const char* name, size_t n_bytes, int& fd_out);

// Reserves zeroed pages for a part of a memfd: want of memory is an error here, not a SIGBUS later.
Error reserve_shared_memory(int fd, size_t offset, size_t n_bytes);

// The process's own shared allocations (`shoal.empty`), found again by address.
//
// Threads: any.
// Buffers: a region lives until release(); peers hold mappings of their own. A forked child sees
// the contents but shares no region: its writes are private.
class Regions {
 public:
  struct Region {
    uint32_t id = 0;
    int fd = -1;
    std::byte* data = nullptr;
    size_t size = 0;  // whole pages
    size_t used = 0;  // as requested
    const std::byte* shared_upto =
        nullptr;  // the start of the first fenced page, or the region's end
  };

  static Regions& of_process();

  Error allocate(size_t n_bytes, Region& out);
  void release(const std::byte* data);

  // The region that holds all of [data, data + n_bytes), its `shared_upto` counted from there; id 0
  // if there is none or a part of it is fenced. The descriptor in it stays open for as long as the
  // region lives.
  Region find(const std::byte* data, size_t n_bytes);
  // The region around `data`, as it was before any fence; id 0 if there is none.
  Region whole(const std::byte* data);
  Region with_id(uint32_t id);  // id 0 if it was released

  // True if the pages of [data, data + n_bytes) are shared and hold nothing but [lo, hi) of the
  // same region.
  static bool alone_on_pages(const Region& region, const std::byte* data, size_t n_bytes,
                             const std::byte* lo, const std::byte* hi);

  // How a peer that has not learned of a call's failure may still access the call's memory.
  enum class Against {
    kReads,   // it still reads the present contents; this process keeps them too
    kWrites,  // whole pages of the range lose their contents and read as zero from now on
  };
  // Takes the pages of [data, data + n_bytes) away from all processes that map them: this process
  // gets private pages at the same addresses, which are never shared again. The rest of the region
  // stays shared. Copies two pages at most. Fenced pages stay as they are, so fence against writes
  // first. Memory outside all regions needs no fence.
  //
  // An error: the kernel has no mapping left; a peer may still reach the memory.
  [[nodiscard]] Error fence(const std::byte* data, size_t n_bytes, Against against);

 private:
  struct Owned {
    Region region;
    Mapping mapping;
    std::map<std::byte*, std::byte*> fenced;  // by first page: the end
  };
  Regions();
  Owned* around(const std::byte* data);
  void after_fork_in_child();

  std::mutex mutex_;
  std::map<const std::byte*, Owned> by_address_;
  std::map<uint32_t, const std::byte*> by_id_;
  uint32_t next_id_ = 1;
};

}  // namespace shoal
