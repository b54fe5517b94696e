// Shared memory without names: sealed memfds, gone with the last process however it dies.
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

  // Maps `n_bytes` of `fd`, readable and writable. `fd` stays the caller's.
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

// Whether that much is left to take. A memfd has no limit of its own: asking for more than there is
// would not fail but wake the out-of-memory killer.
Error check_shared_memory_fits(size_t n_bytes);

// A new memfd of `n_bytes`, sealed against resizing, whose memory must be reserved before it is
// used. Returns the descriptor in `fd_out`.
Error create_shared_memory(const char* name, size_t n_bytes, int& fd_out);

// Gives a part of a memfd its pages, zeroed: want of memory is an error here, not a SIGBUS later.
Error reserve_shared_memory(int fd, size_t offset, size_t n_bytes);

// The process's own shared allocations (`shoal.empty`), found again by address.
//
// Threads: any.
// Buffers: a region lives until release(); peers hold mappings of their own. A forked child sees
// what is there, and its writes are its own: no region is shared in it.
class Regions {
 public:
  struct Region {
    uint32_t id = 0;
    int fd = -1;
    std::byte* data = nullptr;
    size_t size = 0;  // whole pages
    size_t used = 0;  // what was asked for
    const std::byte* shared_upto =
        nullptr;  // where the first fenced page begins, or the region ends
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

  // Whether the pages of [data, data + n_bytes) are shared and hold nothing but [lo, hi) of the
  // same region.
  static bool alone_on_pages(const Region& region, const std::byte* data, size_t n_bytes,
                             const std::byte* lo, const std::byte* hi);

  // What a peer that does not know that a call has failed may still be doing to its memory.
  enum class Against {
    kReads,   // it goes on reading what is there now; this process keeps that too
    kWrites,  // what lies in whole pages of the range is lost: they read zero from here on
  };
  // Takes the pages of [data, data + n_bytes) away from whoever maps them: this process gets
  // private ones at the same addresses, and these are never shared again. The rest of the region
  // is shared as before. Copies two pages at most. Pages that are fenced already stay as they are,
  // so what is fenced against writes comes first. Memory outside all regions needs no fence.
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
