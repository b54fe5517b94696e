#include "base/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <string>

namespace shoal {
namespace {

Error refused(const char* doing, size_t n_bytes, int sys) {
  return {
      Fault::kResource, -1,
      std::string(doing) + " of " + std::to_string(n_bytes) +
          " B of shared memory failed: " + std::strerror(sys) +
          "; free memory, raise the memory limit of this job or container, or the limit of open "
          "files (ulimit -n)"};
}

constexpr size_t kPage = 4096;

std::byte* page_of(const std::byte* at) {
  return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(at) / kPage * kPage);
}

// What the kernel could give now. A memfd has no limit of its own: asking for more would not fail
// but wake the out-of-memory killer.
size_t available_memory() {
  std::ifstream meminfo("/proc/meminfo");
  for (std::string word; meminfo >> word;) {
    size_t kilobytes = 0;
    if (word == "MemAvailable:" && meminfo >> kilobytes) return kilobytes * 1024;
  }
  return SIZE_MAX;  // no /proc: the reservation itself must tell
}

}  // namespace

Mapping::~Mapping() {
  if (data_ != nullptr) munmap(data_, size_);
}

Error Mapping::map(int fd, size_t n_bytes, Mapping& out) {
  void* at = mmap(nullptr, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) return refused("mapping", n_bytes, errno);
  Mapping mapped;
  mapped.data_ = static_cast<std::byte*>(at);
  mapped.size_ = n_bytes;
  out = std::move(mapped);
  return {};
}

Error create_shared_memory(const char* name, size_t n_bytes, size_t n_reserved, int& fd_out) {
  if (n_bytes > available_memory()) return refused("reservation", n_bytes, ENOMEM);
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return refused("creation", n_bytes, errno);
  if (ftruncate(fd, static_cast<off_t>(n_bytes)) != 0) {
    const int sys = errno;
    close(fd);
    return refused("reservation", n_bytes, sys);
  }
  if (Error error = reserve_shared_memory(fd, 0, n_reserved)) {
    close(fd);
    return error;
  }
  if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int sys = errno;
    close(fd);
    return refused("sealing", n_bytes, sys);
  }
  fd_out = fd;
  return {};
}

Error reserve_shared_memory(int fd, size_t offset, size_t n_bytes) {
  // A signal makes many kernels undo what they have reserved so far and say EINTR.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  const int failed = posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(n_bytes));
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return failed == 0 ? Error{} : refused("reservation", n_bytes, failed);
}

Regions& Regions::of_process() {
  // Never destroyed: buffers may outlive every destructor at interpreter exit.
  static Regions* const regions = new Regions;
  return *regions;
}

Error Regions::allocate(size_t n_bytes, Region& out) {
  const size_t size = (n_bytes + kPage - 1) / kPage * kPage + (n_bytes == 0 ? kPage : 0);
  int fd = -1;
  if (Error error = create_shared_memory("shoal-buffer", size, size, fd)) return error;
  Owned owned;
  if (Error error = Mapping::map(fd, size, owned.mapping)) {
    close(fd);
    return error;
  }
  std::lock_guard lock(mutex_);
  owned.region = {next_id_++, fd, owned.mapping.data(), size, n_bytes};
  out = owned.region;
  by_id_[out.id] = out.data;
  by_address_[out.data] = std::move(owned);
  return {};
}

void Regions::release(const std::byte* data) {
  std::lock_guard lock(mutex_);
  const auto found = by_address_.find(data);
  if (found == by_address_.end()) return;
  close(found->second.region.fd);
  if (found->second.region.id != 0) by_id_.erase(found->second.region.id);
  by_address_.erase(found);
}

Regions::Region Regions::find(const std::byte* data, size_t n_bytes) {
  std::lock_guard lock(mutex_);
  if (by_address_.empty()) return {};
  auto after = by_address_.upper_bound(data);
  if (after == by_address_.begin()) return {};
  const Region& region = std::prev(after)->second.region;
  const bool inside = data + n_bytes <= region.data + region.size;
  return inside ? region : Region{};
}

Regions::Region Regions::with_id(uint32_t id) {
  std::lock_guard lock(mutex_);
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? Region{} : by_address_.at(found->second).region;
}

bool Regions::alone_on_pages(const Region& region, const std::byte* data, size_t n_bytes,
                             const std::byte* lo, const std::byte* hi) {
  const std::byte* first = page_of(data);
  const std::byte* end = page_of(data + n_bytes + kPage - 1);
  return first >= lo && (end <= hi || hi == region.data + region.used);
}

void Regions::fence(const std::byte* data, size_t n_bytes) {
  std::lock_guard lock(mutex_);
  auto after = by_address_.upper_bound(data);
  if (after == by_address_.begin()) return;
  Region& region = std::prev(after)->second.region;
  if (data >= region.data + region.size) return;
  by_id_.erase(region.id);
  region.id = 0;
  std::byte* first = page_of(data);
  const size_t n_fenced = static_cast<size_t>(page_of(data + n_bytes + kPage - 1) - first);
  void* copy = mmap(nullptr, n_fenced, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) return;  // out of address space: the group has failed loudly already
  std::memcpy(copy, first, n_fenced);
  mremap(copy, n_fenced, n_fenced, MREMAP_MAYMOVE | MREMAP_FIXED, first);
}

}  // namespace shoal
