// A signal handler that only writes to an eventfd, which a thread waits for. It is safe whatever
// other threads are doing.
#pragma once

#include "base/error.h"

namespace shoal {

// Install the handler: each `signal` adds one to the returned eventfd, and then calls the previous
// handler if there was one. Blocking reads wait for the next signal. Returns -1 with `error` on
// failure. One signal per process; a second call returns the same descriptor.
//
// In a forked child the signal does nothing until note_signal() is called there.
int note_signal(int signal, Error& error);

}  // namespace shoal
