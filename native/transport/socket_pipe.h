// A connected stream socket as a pipe.
#pragma once

#include <climits>
#include <cstdint>
#include <mutex>

#include "transport/pipe.h"

namespace shoal {

// All open pipes are in a list, for fork: the child inherits the descriptor of a pipe that another
// thread is about to close, but not that thread.
class SocketPipe final : public Pipe {
 public:
  // Takes ownership of `fd` and makes it non-blocking.
  explicit SocketPipe(int fd);
  ~SocketPipe() override;

  ssize_t write(const iovec* vectors, size_t n_vectors) override;
  ssize_t read(const iovec* vectors, size_t n_vectors) override;
  void end(bool both) override;
  int fd() const override { return fd_; }
  Silence silence() override;
  int64_t n_unconfirmed() const override;
  size_t appetite() const override { return static_cast<size_t>(unsent_); }

  // A lock held while the process forks; no other lock is taken under it.
  static std::mutex& forking();
  // In a forked child, with forking() held: close all pipes, which are the parent's.
  static void forsake_all();

 private:
  void set(int option, int value);
  void suit_the_way();
  void leave_bbr();
  void note_written(ssize_t n_bytes);

  static SocketPipe*& first();

  int fd_;
  SocketPipe *next_ = nullptr, *before_ = nullptr;
  uint64_t n_until_look_ = 0;         // bytes
  int unsent_ = INT_MAX;              // the bound on unsent bytes; INT_MAX: none
  int64_t first_unconfirmed_ns_ = 0;  // when the first possibly unconfirmed byte left; 0: none
};

}  // namespace shoal
