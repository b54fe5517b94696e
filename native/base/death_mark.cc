#include "base/death_mark.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>

#include "base/page.h"
#include "base/signals_blocked.h"

namespace shoal {
namespace {

static_assert(DeathMark::kDied == FUTEX_OWNER_DIED);

robust_list* entry_of(std::byte* pages) { return reinterpret_cast<robust_list*>(pages); }

std::atomic<uint32_t>& word_of(std::byte* pages) {
  return *reinterpret_cast<std::atomic<uint32_t>*>(pages + page_bytes());
}

// The kernel may read these at any moment.
void point(robust_list*& from, robust_list* to) { __atomic_store_n(&from, to, __ATOMIC_SEQ_CST); }

// The thread that holds all words of this process; it lives while there is a word.
class Keeper {
 public:
  static Keeper& of_process() {
    // Never destroyed: the holder of a word may outlive every destructor.
    static Keeper* const keeper = [] {
      pthread_atfork([] { of_process().mutex_.lock(); }, [] { of_process().mutex_.unlock(); },
                     [] { of_process().after_fork_in_child(); });
      return new Keeper;
    }();
    return *keeper;
  }

  Error hold(std::byte* pages, uint64_t& made_by_out) {
    std::lock_guard lock(mutex_);
    if (n_held_ == 0)
      if (Error error = start()) return error;
    ++n_held_;
    made_by_out = n_forks_;
    // The word is marked even if the process dies between the next two lines.
    point(head_.list_op_pending, entry_of(pages));
    word_of(pages).store(thread_id_.load());
    point(entry_of(pages)->next, head_.list.next);
    point(head_.list.next, entry_of(pages));
    point(head_.list_op_pending, nullptr);
    return {};
  }

  // False in a forked child: the word is its parent's.
  bool let_go(std::byte* pages, uint64_t made_by) {
    std::lock_guard lock(mutex_);
    if (made_by != n_forks_) return false;
    word_of(pages).store(0);
    robust_list* before = &head_.list;
    while (before->next != entry_of(pages)) before = before->next;
    point(before->next, entry_of(pages)->next);
    if (--n_held_ == 0) stop();
    return true;
  }

 private:
  Keeper() { forget(); }

  void forget() {
    head_.list.next = &head_.list;
    head_.futex_offset = static_cast<long>(page_bytes());
    head_.list_op_pending = nullptr;
    n_held_ = 0;
  }

  Error start() {
    Error error;
    thread_id_ = 0;
    is_over_ = 0;
    const SignalsBlocked blocked;
    try {
      thread_ = std::thread([this] { run(); });
      pthread_setname_np(thread_.native_handle(), "shoal-life");
    } catch (const std::exception& refused) {
      error = {Fault::kResource, -1,
               std::string("could not start a thread: ") + refused.what() +
                   "; raise the limit of processes (ulimit -u) or the pids limit of the container"};
    }
    if (!error) thread_id_.wait(0);
    return error;
  }

  void stop() {
    is_over_ = 1;
    is_over_.notify_all();
    thread_.join();
  }

  // Replaces the C library's list, which is for mutexes that this thread never takes. On a kernel
  // without such lists a death is detected by silence.
  void run() {
    syscall(SYS_set_robust_list, &head_, sizeof(head_));
    thread_id_ = static_cast<uint32_t>(syscall(SYS_gettid));
    thread_id_.notify_all();
    is_over_.wait(0);
  }

  // Only this thread exists now.
  void after_fork_in_child() {
    ++n_forks_;
    forget();
    if (thread_.joinable()) new std::thread(std::move(thread_));  // leaked: there is no such thread
    mutex_.unlock();
  }

  std::mutex mutex_;
  std::thread thread_;
  std::atomic<uint32_t> thread_id_{0};
  std::atomic<uint32_t> is_over_{0};
  robust_list_head head_{};
  size_t n_held_ = 0;
  uint64_t n_forks_ = 0;
};

}  // namespace

Error DeathMark::set(int fd, size_t offset) {
  const auto refused = [] {
    return Error{Fault::kResource, -1,
                 std::string("mapping of a death mark failed: ") + std::strerror(errno) +
                     "; raise the limit of mappings (vm.max_map_count)"};
  };
  const size_t page = page_bytes();
  void* at = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) return refused();
  auto* const pages = static_cast<std::byte*>(at);
  Error error;
  if (mmap(pages + page, page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
           static_cast<off_t>(offset)) == MAP_FAILED)
    error = refused();
  if (!error) error = Keeper::of_process().hold(pages, made_by_);
  if (error)
    munmap(pages, 2 * page);
  else
    pages_ = pages;
  return error;
}

void DeathMark::prepare_for_forks() { Keeper::of_process(); }

void DeathMark::clear() {
  std::byte* const pages = std::exchange(pages_, nullptr);
  if (pages != nullptr && Keeper::of_process().let_go(pages, made_by_))
    munmap(pages, 2 * page_bytes());
}

}  // namespace shoal
