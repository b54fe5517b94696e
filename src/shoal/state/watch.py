"""`SHOAL_DUMP_SIGNAL`: a signal makes this process write its state.

The native handler only wakes a thread that waits for nothing else (native/base/signal_note.h). So
it works while the main thread is in `wait()`, or in code that never returns to the interpreter,
unless a thread holds the interpreter for ever.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Final

from shoal import engine, threads
from shoal.errors import UsageError

_LOG: Final = logging.getLogger("shoal")

# Other signals report faults, stop the process, or belong to Python.
_KNOWN: Final = ("USR1", "USR2", "HUP", "QUIT")

_lock: Final = threading.Lock()
_watched = 0  # the process that has the thread: a forked child has none


def signal_of(wanted: str) -> signal.Signals:
    """Return the signal that `SHOAL_DUMP_SIGNAL` names; UsageError for an unusable one."""
    name = wanted.upper().removeprefix("SIG")
    if name not in _KNOWN:
        raise UsageError(
            f"SHOAL_DUMP_SIGNAL={wanted!r} is not one of {', '.join(_KNOWN)}; leave it unset to "
            "handle no signal"
        )
    return signal.Signals[f"SIG{name}"]


def call_at(number: signal.Signals, write: Callable[[], object]) -> None:
    """Call `write` on its own thread whenever the signal arrives. Idempotent.

    If the signal or the thread is not available, logs the reason as a warning and returns.
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
        try:
            write()
        except Exception:  # noqa: BLE001, PERF203 - the next signal may succeed
            _LOG.exception("the state of this process cannot be described")
