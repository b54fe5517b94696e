#include "base/signal_note.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>

namespace shoal {
namespace {

std::atomic<int> note_fd{-1};
struct sigaction before{};
int handled = 0;  // the signal, once there is a handler

// Async-signal-safe; the counter takes 2^64 notes before a write would block.
void leave_note(int signal, siginfo_t* info, void* context) {
  const int saved = errno;
  const uint64_t one = 1;
  if (const int fd = note_fd.load(); fd >= 0)
    if (write(fd, &one, sizeof(one)) < 0) errno = 0;  // the note is lost
  errno = saved;
  if ((before.sa_flags & SA_SIGINFO) != 0)
    before.sa_sigaction(signal, info, context);
  else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN)
    before.sa_handler(signal);
}

// The child shares the eventfd with its parent: a note written there would reach the parent.
void forget_in_child() {
  if (const int fd = note_fd.exchange(-1); fd >= 0) close(fd);
}

Error cannot(const char* what) {
  return {Fault::kResource, -1, std::string(what) + ": " + std::strerror(errno)};
}

}  // namespace

int note_signal(int signal, Error& error) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (handled != 0 && handled != signal) {
    error = {Fault::kResource, -1, "signal " + std::to_string(handled) + " is already in use"};
    return -1;
  }
  if (note_fd >= 0) return note_fd;
  const int fd = eventfd(0, EFD_CLOEXEC);
  if (fd < 0) {
    error = cannot("no descriptor is left");
    return -1;
  }
  note_fd = fd;
  if (handled != 0) return fd;  // in a forked child, the handler is there
  struct sigaction action{};
  sigfillset(&action.sa_mask);
  action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
  action.sa_sigaction = leave_note;
  if (sigaction(signal, nullptr, &before) != 0 || sigaction(signal, &action, nullptr) != 0) {
    error = cannot("it cannot be handled");
    note_fd = -1;
    close(fd);
    return -1;
  }
  handled = signal;
  pthread_atfork(nullptr, nullptr, forget_in_child);
  return fd;
}

}  // namespace shoal
