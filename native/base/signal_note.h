// A signal that only leaves a note, for a thread that waits for it: no other work is done in the
// handler, and it does not matter what any thread is doing.
#pragma once

#include "base/error.h"

namespace shoal {

// From here on each `signal` adds one to the eventfd that is returned, and whatever handled it
// before (unless that was the default, or nothing) does so too. Blocking reads of the descriptor
// wait for the next one. -1: `error` says why not. One signal per process; asked again, the same
// descriptor.
//
// In a forked child the signal does nothing until it is asked for there.
int note_signal(int signal, Error& error);

}  // namespace shoal
