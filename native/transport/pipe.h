// One stream of bytes each way to one peer: a socket, or its seeded double.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace shoal {

// Closed when it is destroyed, if not before.
class Pipe {
 public:
  virtual ~Pipe() = default;

  // As a socket does that never blocks: bytes moved, or -1 and errno. Reading 0 is the end. To have
  // read less than asked for means that there is no more for now.
  virtual ssize_t write(const iovec* vectors, size_t n_vectors) = 0;
  virtual ssize_t read(const iovec* vectors, size_t n_vectors) = 0;
  // Nothing more is written; `both`: nor read.
  virtual void end(bool both) = 0;
  virtual int fd() const { return -1; }

  // What the medium itself knows of the other end, whatever the program there does.
  struct Silence {
    int64_t owed_ns = 0;   // for so long bytes that left wait to be confirmed; 0: none do
    int64_t heard_ns = 0;  // so long ago it confirmed something
    int64_t usual_ns = 0;  // that it takes
  };
  virtual Silence silence() { return {}; }
  // Bytes that it took and the other end's medium has not confirmed; -1: it cannot tell.
  virtual int64_t n_unconfirmed() const { return -1; }
  // About how many bytes it takes before it makes its writer wait.
  virtual size_t appetite() const { return SIZE_MAX; }
};

}  // namespace shoal
