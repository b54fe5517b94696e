// A connected stream socket as a pipe.
#pragma once

#include <climits>
#include <cstdint>

#include "transport/pipe.h"

namespace shoal {

class SocketPipe final : public Pipe {
 public:
  // Owns `fd` and makes it non-blocking. `has_others`: the link has other paths, so that this one
  // is given up where its peer confirms nothing for four seconds.
  SocketPipe(int fd, bool has_others);
  ~SocketPipe() override;

  ssize_t write(const iovec* vectors, size_t n_vectors) override;
  ssize_t read(const iovec* vectors, size_t n_vectors) override;
  void end(bool both) override;
  int fd() const override { return fd_; }
  size_t appetite() const override { return static_cast<size_t>(unsent_); }

 private:
  void set(int option, int value);
  void bound_unsent();

  const int fd_;
  uint64_t n_until_look_ = 0;  // bytes
  int unsent_ = INT_MAX;       // where there is no such bound
};

}  // namespace shoal
