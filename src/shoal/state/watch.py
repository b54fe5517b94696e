"""`SHOAL_DUMP_SIGNAL`: a signal makes this process write down its state.

Its handler only leaves a note (native/base/signal_note.h), for a thread that waits for nothing
else: so it does not matter whether the main thread is in `wait()`, or in code that never returns to
the interpreter, as long as nobody holds the interpreter for ever.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Final

from shoal import engine, threads
from shoal.errors import UsageError

_LOG: Final = logging.getLogger("shoal")

# Others stand for faults, stop the process, or belong to Python.
_KNOWN: Final = ("USR1", "USR2", "HUP", "QUIT")

_lock: Final = threading.Lock()
_watched = 0  # the process that has the thread: a forked child has none


def signal_of(environ: Mapping[str, str]) -> signal.Signals | None:
    """The signal that is asked for.

    Raises:
        UsageError: it is none that can be had.
    """
    wanted = environ.get("SHOAL_DUMP_SIGNAL", "")
    if not wanted:
        return None
    name = wanted.upper().removeprefix("SIG")
    if name not in _KNOWN:
        raise UsageError(
            f"SHOAL_DUMP_SIGNAL={wanted!r} is none of {', '.join(_KNOWN)}; leave it unset to have "
            "no signal handled"
        )
    return signal.Signals[f"SIG{name}"]


def call_at(number: signal.Signals, write: Callable[[], object]) -> None:
    """Call `write` on a thread of its own whenever the signal comes, from now on. Idempotent.

    A job does not fail for want of it: a warning says what is in the way.
    """
    global _watched  # noqa: PLW0603 - signals belong to the process
    with _lock:
        if _watched == os.getpid():
            return
        try:
            note_fd = engine.note_signal(number)
            threads.start("shoal-dump", _serve, note_fd, write)
        except (MemoryError, RuntimeError) as error:
            _LOG.warning("%s will not make this process write its state: %s", number.name, error)
            return
        _watched = os.getpid()


def _serve(note_fd: int, write: Callable[[], object]) -> None:
    while os.read(note_fd, 8):
        _attempt(write)


def _attempt(write: Callable[[], object]) -> None:
    try:
        write()
    except Exception:  # noqa: BLE001 - the next signal may find things better
        _LOG.exception("the state of this process cannot be told")
