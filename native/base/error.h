// An error as a value: errors cross threads, so nothing below bind/ throws.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <string>
#include <utility>

namespace shoal {

enum class Fault : int {
  kNone = 0,
  kPeerLost = 1,  // a peer died, stalled past the deadline, or broke the protocol
  kTimedOut = 2,  // a deadline passed
  kMismatch = 3,  // ranks made different calls
  kClosed = 4,    // this group was closed or aborted on purpose
  kResource = 5,  // the kernel refused memory or descriptors
  kInternal = 6,  // a bug in this library
};

struct Error {
  Fault fault = Fault::kNone;
  int peer = -1;           // rank of the mesh to blame, -1 if none
  std::string text;        // what happened; kPeerLost: a verb phrase about the peer
  std::string doing = {};  // the call that was in flight, empty if none
  bool of_path = false;    // kPeerLost, from a link: the path is gone, but the peer may live
  bool is_unmet = false;   // and there never was a path: the peer may have left in good order

  explicit operator bool() const { return fault != Fault::kNone; }
};

// End the process: to continue would give a wrong result, and no caller can receive the error.
[[noreturn]] inline void end_process(const Error& why) {
  const std::string text = "shoal ends this process: " + why.text + "\n";
  [[maybe_unused]] const ssize_t n = write(STDERR_FILENO, text.data(), text.size());
  std::abort();
}

}  // namespace shoal
