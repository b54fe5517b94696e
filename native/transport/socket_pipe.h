// A connected stream socket as a pipe.
#pragma once

#include <climits>
#include <cstdint>

#include "transport/pipe.h"

namespace shoal {

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
  size_t appetite() const override { return static_cast<size_t>(unsent_); }

 private:
  void set(int option, int value);
  void bound_unsent();

  const int fd_;
  uint64_t n_until_look_ = 0;         // bytes
  int unsent_ = INT_MAX;              // where there is no such bound
  int64_t first_unconfirmed_ns_ = 0;  // when the first byte left that may be so; 0: none
};

}  // namespace shoal
