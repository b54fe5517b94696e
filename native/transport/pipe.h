// A stream of bytes to and from one peer: a socket, or its seeded double in tests.
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

  // As for a non-blocking socket: the bytes moved, or -1 and errno. Reading 0 is the end. A short
  // read means that there is no more for now.
  virtual ssize_t write(const iovec* vectors, size_t n_vectors) = 0;
  virtual ssize_t read(const iovec* vectors, size_t n_vectors) = 0;
  // Shut down writing; `both`: and reading.
  virtual void end(bool both) = 0;
  virtual int fd() const { return -1; }

  // What the medium knows of the other end, independent of the program there.
  struct Silence {
    int64_t owed_ns = 0;             // how long the oldest unconfirmed byte has waited; 0: none
    int64_t since_confirmed_ns = 0;  // time since the last confirmation
    int64_t usual_ns = 0;            // the usual time of a confirmation
  };
  virtual Silence silence() { return {}; }
  // Bytes that were written and not yet confirmed by the other end's kernel; -1: unknown.
  virtual int64_t n_unconfirmed() const { return -1; }
  // About how many bytes can be written before the writer must wait.
  virtual size_t appetite() const { return SIZE_MAX; }
};

}  // namespace shoal
