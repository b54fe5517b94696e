#include "base/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "base/memory_left.h"
#include "base/page.h"
#include "base/signals_blocked.h"

namespace shoal {
namespace {

Error refused(const char* doing, size_t n_bytes, int sys) {
  const char* const what_to_do =
      sys == EFBIG ? "; raise the limit of file sizes (ulimit -f): shared memory counts as a file"
                   : "; free memory, raise the memory limit of this job or container, or the "
                     "limit of open files (ulimit -n)";
  return {Fault::kResource, -1,
          std::string(doing) + " of " + std::to_string(n_bytes) +
              " B of shared memory failed: " + std::strerror(sys) + what_to_do};
}

std::byte* page_of(const std::byte* at) {
  return reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(at) / page_bytes() *
                                      page_bytes());
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

Error check_shared_memory_fits(size_t n_bytes) {
  const MemoryLeft left = memory_left();
  if (n_bytes <= left.n_bytes) return {};
  return {Fault::kResource, -1,
          "reservation of " + std::to_string(n_bytes) + " B of shared memory failed: " +
              left.where + " leaves " + std::to_string(left.n_bytes) +
              " B; free memory, or raise the memory limit of this job or container"};
}

Error create_shared_memory(const char* name, size_t n_bytes, int& fd_out) {
  const int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return refused("creation", n_bytes, errno);
  if (ftruncate(fd, static_cast<off_t>(n_bytes)) != 0) {
    const int sys = errno;
    close(fd);
    return refused("reservation", n_bytes, sys);
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
  // On a signal many kernels undo what they have reserved so far and return EINTR.
  const SignalsBlocked blocked;
  const int failed = posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(n_bytes));
  return failed == 0 ? Error{} : refused("reservation", n_bytes, failed);
}

// ---- regions

namespace {

using Fenced = std::map<std::byte*, std::byte*>;

// The start of the first fenced page at or after `from`; `end` if there is none before it.
std::byte* next_fenced(const Fenced& fenced, std::byte* from, std::byte* end) {
  auto after = fenced.upper_bound(from);
  if (after != fenced.begin() && std::prev(after)->second > from) return from;
  return after == fenced.end() ? end : std::min(after->first, end);
}

// Calls visit(first, end) for every run of pages of [first, end) that is not fenced, until it
// returns an error.
template <class Visit>
Error for_each_shared(const Fenced& fenced, std::byte* first, std::byte* end, Visit visit) {
  while (first < end) {
    std::byte* const upto = next_fenced(fenced, first, end);
    if (first < upto)
      if (Error error = visit(first, upto)) return error;
    const auto behind = fenced.upper_bound(upto);
    first = behind == fenced.begin() ? upto : std::max(upto, std::prev(behind)->second);
  }
  return {};
}

// From now on writes of this process to [first, end) are private; bytes that it has not written
// still show the shared memory.
Error copy_on_write(const Regions::Region& region, std::byte* first, std::byte* end) {
  const auto n_bytes = static_cast<size_t>(end - first);
  void* at = mmap(first, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, region.fd,
                  static_cast<off_t>(first - region.data));
  if (at != MAP_FAILED) return {};
  return {Fault::kResource, -1,
          "private mapping of " + std::to_string(n_bytes) + " B of shared memory failed: " +
              std::strerror(errno) + "; raise the limit of mappings (vm.max_map_count)"};
}

// Makes the private copy of a copy-on-write page.
void touch(std::byte* page) {
  auto* const at = reinterpret_cast<volatile std::byte*>(page);
  *at = *at;
}

// Ends writes by other processes to the pages of [first, end), which are copy-on-write. Pages in
// [lost_first, lost_end) need not be copied.
void detach(std::byte* first, std::byte* end, std::byte* lost_first, std::byte* lost_end) {
  lost_first = std::clamp(lost_first, first, end);
  lost_end = std::clamp(lost_end, lost_first, end);
  if (lost_first < lost_end &&
      mmap(lost_first, static_cast<size_t>(lost_end - lost_first), PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
    lost_end = lost_first;  // one more mapping was too many: copying needs none
  for (std::byte* page = first; page < end; page += page_bytes())
    if (page < lost_first || page >= lost_end) touch(page);
}

}  // namespace

Regions& Regions::of_process() {
  // Never destroyed: buffers may outlive every destructor at interpreter exit.
  static Regions* const regions = new Regions;
  return *regions;
}

// For every fork, even by a library that does not know Python: the child must not inherit a lock
// that nobody releases, nor write to the memory that the parent shares.
Regions::Regions() {
  pthread_atfork([] { of_process().mutex_.lock(); }, [] { of_process().mutex_.unlock(); },
                 [] { of_process().after_fork_in_child(); });
}

void Regions::after_fork_in_child() {
  for (auto& [data, owned] : by_address_) {
    const Region& region = owned.region;
    std::byte* const end = region.data + region.size;
    const auto make_own = [&](std::byte* first, std::byte* upto) {
      return copy_on_write(region, first, upto);
    };
    if (Error error = for_each_shared(owned.fenced, region.data, end, make_own)) end_process(error);
    owned.fenced = {{region.data, end}};
  }
  mutex_.unlock();
}

Error Regions::allocate(size_t n_bytes, Region& out) {
  const size_t size = whole_pages(std::max<size_t>(n_bytes, 1));
  if (Error error = check_shared_memory_fits(size)) return error;
  int fd = -1;
  if (Error error = create_shared_memory("shoal-buffer", size, fd)) return error;
  Owned owned;
  Error error = reserve_shared_memory(fd, 0, size);
  if (!error) error = Mapping::map(fd, size, owned.mapping);
  if (error) {
    close(fd);
    return error;
  }
  std::byte* const data = owned.mapping.data();
  std::lock_guard lock(mutex_);
  owned.region = {next_id_++, fd, data, size, n_bytes, data + size};
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
  by_id_.erase(found->second.region.id);
  by_address_.erase(found);
}

Regions::Owned* Regions::around(const std::byte* data) {
  const auto after = by_address_.upper_bound(data);
  if (after == by_address_.begin()) return nullptr;
  Owned& owned = std::prev(after)->second;
  return data < owned.region.data + owned.region.size ? &owned : nullptr;
}

Regions::Region Regions::find(const std::byte* data, size_t n_bytes) {
  std::lock_guard lock(mutex_);
  const Owned* owned = around(data);
  if (owned == nullptr) return {};
  Region region = owned->region;
  region.shared_upto =
      next_fenced(owned->fenced, const_cast<std::byte*>(data), region.data + region.size);
  return data + n_bytes <= region.shared_upto ? region : Region{};
}

Regions::Region Regions::whole(const std::byte* data) {
  std::lock_guard lock(mutex_);
  const Owned* owned = around(data);
  return owned == nullptr ? Region{} : owned->region;
}

Regions::Region Regions::with_id(uint32_t id) {
  std::lock_guard lock(mutex_);
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? Region{} : by_address_.at(found->second).region;
}

bool Regions::alone_on_pages(const Region& region, const std::byte* data, size_t n_bytes,
                             const std::byte* lo, const std::byte* hi) {
  const std::byte* first = page_of(data);
  const std::byte* end = page_of(data + n_bytes + page_bytes() - 1);
  return first >= lo && (end <= hi || hi == region.data + region.used) && end <= region.shared_upto;
}

Error Regions::fence(const std::byte* data, size_t n_bytes, Against against) {
  std::lock_guard lock(mutex_);
  Owned* owned = around(data);
  if (owned == nullptr) return {};
  std::byte* const first = page_of(data);
  std::byte* const end = page_of(data + n_bytes + page_bytes() - 1);
  // Allocate the list first: after the first mapping nothing may be lost to a failed allocation.
  Fenced taken;
  (void)for_each_shared(owned->fenced, first, end, [&](std::byte* from, std::byte* upto) {
    taken.emplace(from, upto);
    return Error{};
  });
  for (const auto& [from, upto] : taken) {
    if (Error error = copy_on_write(owned->region, from, upto)) return error;
    if (against == Against::kWrites)
      detach(from, upto, page_of(data + page_bytes() - 1), page_of(data + n_bytes));
  }
  owned->fenced.merge(taken);
  return {};
}

}  // namespace shoal
