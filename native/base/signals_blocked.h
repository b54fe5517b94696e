// Blocks all signals of this thread for its lifetime. Threads that it starts inherit that: signals
// belong to the program's own threads.
#pragma once

#include <pthread.h>

#include <csignal>

namespace shoal {

class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace shoal
