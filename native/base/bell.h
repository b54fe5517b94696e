// An eventfd that wakes a thread which waits outside the native core.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstdint>

namespace shoal {

// Threads: one at a time.
class Bell {
 public:
  Bell() = default;
  ~Bell() {
    if (fd_ >= 0) close(fd_);
  }
  Bell(const Bell&) = delete;
  Bell& operator=(const Bell&) = delete;

  // Duplicates the descriptor, once. Returns false if the process has no descriptor left.
  bool hang(int fd) {
    if (fd_ < 0) fd_ = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    return fd_ >= 0;
  }
  // Adds one to the eventfd. The waiting thread may wake without finding anything new.
  void ring() const {
    const uint64_t one = 1;
    if (fd_ < 0) return;
    [[maybe_unused]] const ssize_t n = write(fd_, &one, sizeof(one));
  }

 private:
  int fd_ = -1;
};

}  // namespace shoal
