"""The state of this process: the peers that each call in flight waits for, why, and how long.

`dump` returns it. A call that times out, and the signal in `SHOAL_DUMP_SIGNAL`, write it to files.
docs/dump.md describes the files.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import signal
    from collections.abc import Mapping

# The modules that describe, write and watch are imported where they are used: most jobs never need
# them, and every rank would pay for them while the group forms.

__all__ = ["SOURCES", "AtDeadline", "Dump", "dump", "heed_settings"]

_LOG: Final = logging.getLogger("shoal")

SOURCES: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""The contexts (`shoal.group.context`) of this process, one per world."""

# A process whose deadlines pass again and again must not fill a disk. `dump` and signals have no
# limit.
_MOST_AT_DEADLINES: Final = 8


class Dump(NamedTuple):
    """The state of a process.

    Args:
        state: plain data, as in the JSON file; docs/dump.md describes it.
        text: the same data as text for people.
        files: the paths of both; empty if no path was given or writing failed.
    """

    state: dict[str, Any]
    text: str
    files: tuple[Path, ...] = ()

    def __str__(self) -> str:
        return self.text


def dump(path: str | Path | None = None) -> Dump:
    """Return the state of this process: its links, and the peers that its calls wait for.

    Costs about a millisecond with few calls in flight. Waits at most 5 s for each world's lock, and
    at most 5 s for the disk. Changes nothing; any thread may call it at any time.

    Args:
        path: also write the state there, as `SHOAL_DUMP` does: a folder, or a name in which %r
            stands for the rank, %h for the host and %p for the process. Existing files are kept:
            a number is added to the name. None writes nothing.

    Never raises: a failure to write is logged as a warning.
    """
    return _dump("it was asked for", None if path is None else str(path))


def _dump(why: str, pattern: str | None, taken: Mapping[Any, dict[str, Any]] | None = None) -> Dump:
    from shoal.state.document import describe
    from shoal.state.files import write
    from shoal.state.text import text_of

    state = describe(why, taken)
    text = text_of(state)
    return Dump(state, text, () if pattern is None else write(state, text, pattern))


def heed_settings() -> None:
    """Make the signal in `SHOAL_DUMP_SIGNAL` write the state.

    UsageError for an unusable signal, or if no file can be written at `SHOAL_DUMP`.
    """
    if place := os.environ.get("SHOAL_DUMP"):
        _check_once(place)
    if name := os.environ.get("SHOAL_DUMP_SIGNAL"):
        from shoal.state.watch import call_at, signal_of

        wanted = signal_of(name)
        call_at(wanted, lambda: _write_at_signal(wanted))


@functools.cache
def _check_once(_place: str) -> None:
    """Check the folder for files; one that vanishes later must not keep a job from recovering."""
    from shoal.state.files import check_folder

    check_folder()


def _write_at_signal(number: signal.Signals) -> None:
    from shoal.state.files import pattern_of_job

    pattern = pattern_of_job()
    if pattern is None:
        _LOG.warning("received %s, but SHOAL_DUMP=off: nothing is written", number.name)
    elif files := _dump(f"received {number.name}", pattern).files:
        _LOG.warning("received %s: the state of this rank is in %s", number.name, files[-1])


class AtDeadline:
    """Writes the state of this process, once, when a deadline ends a group."""

    _lock = threading.Lock()
    _last: tuple[int, str] = (0, "")  # groups that one deadline ends share their state
    _n_written = 0

    def __init__(self) -> None:
        self._note: str | None = None

    def note(self, source: Any, native: Any) -> str:
        """Return the words to add to an error: the file with the state; empty for none.

        `native`, the native group or its stand-in, returns the mesh's state at the deadline, once.
        """
        with AtDeadline._lock:
            if self._note is None:
                try:
                    self._note = self._write(source, native)
                except Exception as error:  # noqa: BLE001 - the caller's own error matters more
                    _LOG.exception("the state of this process cannot be described")
                    self._note = f"the state of this rank could not be written: {error!r}"
            return self._note

    @staticmethod
    def _write(source: Any, native: Any) -> str:
        from shoal.state.files import pattern_of_job

        pattern = pattern_of_job()
        taken = native.take_state_at_deadline()
        if taken is None or pattern is None:
            return ""
        if taken["taken_ns"] == AtDeadline._last[0]:
            return AtDeadline._last[1]
        if AtDeadline._n_written == _MOST_AT_DEADLINES:
            return f"no state is written after {_MOST_AT_DEADLINES} deadlines"
        AtDeadline._n_written += 1
        files = _dump("a deadline passed", pattern, {source: taken}).files
        where = f"is in {files[-1]}" if files else "could not be written"
        AtDeadline._last = taken["taken_ns"], f"the state of this rank {where}"
        return AtDeadline._last[1]


def _after_fork_in_child() -> None:
    # Another thread of the parent may have held it.
    AtDeadline._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
