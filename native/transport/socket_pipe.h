// A connected stream socket as a pipe.
#pragma once

#include <climits>
#include <cstdint>
#include <mutex>

#include "transport/pipe.h"

namespace shoal {

// All that are open are in a list: a thread that is about to close one, which nobody else knows of
// any more, is not in the child of a fork, and the descriptor is.
class SocketPipe final : public Pipe {
 public:
  // Owns `fd` and makes it non-blocking.
  explicit SocketPipe(int fd);
  ~SocketPipe() override;

  ssize_t write(const iovec* vectors, size_t n_vectors) override;
  ssize_t read(const iovec* vectors, size_t n_vectors) override;
  void end(bool both) override;
  int fd() const override { return fd_; }
  Silence silence() override;
  int64_t n_unconfirmed() const override;
  size_t appetite() const override { return static_cast<size_t>(unsent_); }

  // Held while the process forks; no other lock is taken under it.
  static std::mutex& forking();
  // In a forked child, where forking() is held: closes all, which are the parent's.
  static void forsake_all();

 private:
  void set(int option, int value);
  void suit_the_way();
  void leave_bbr();

  static SocketPipe*& first();

  int fd_;
  SocketPipe *next_ = nullptr, *before_ = nullptr;
  uint64_t n_until_look_ = 0;         // bytes
  int unsent_ = INT_MAX;              // where there is no such bound
  int64_t first_unconfirmed_ns_ = 0;  // when the first byte left that may be so; 0: none
};

}  // namespace shoal
