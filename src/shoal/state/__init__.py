"""State that can be read: what every call in flight waits for, for whom, and since when.

`dump` tells it when asked; a deadline that passes and, if `SHOAL_DUMP_SIGNAL` says so, a signal
write it to files. docs/dump.md tells what is in them.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from shoal.state.sources import SOURCES

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.state.sources import ContextSource

# What describes, writes and watches is imported where it is used: most jobs never do, and every
# rank would pay for it while the group forms.

__all__ = ["SOURCES", "AtDeadline", "Dump", "dump", "heed_signal"]

_LOG: Final = logging.getLogger("shoal")

# Deadlines that leave files, in the life of a process: one that runs into them again and again must
# not fill a disk. Whoever asks, or sends a signal, always gets some.
_MOST_AT_DEADLINES: Final = 8


class Dump(NamedTuple):
    """What a process could say of itself.

    Args:
        state: plain data, as in the JSON file; docs/dump.md says what is in it.
        text: the same for people.
        files: where both were written; empty if nobody asked for that, or if it failed.
    """

    state: dict[str, Any]
    text: str
    files: tuple[Path, ...] = ()

    def __str__(self) -> str:
        return self.text


def dump(path: str | Path | None = None) -> Dump:
    """What every call in flight in this process waits for, and how its links fare.

    Costs about a millisecond where little is in flight. Waits at most 5 s for each world's lock,
    and at most 5 s for the disk. Changes nothing; any thread may call it at any time.

    Args:
        path: also write it there, as `SHOAL_DUMP` says: a folder, or a name in which %r stands for
            the rank, %h for the host and %p for the process. Files that exist are left alone: a
            number is added. None writes nothing.

    Raises: nothing of its own; what cannot be written is logged as a warning.
    """
    from shoal.state.document import describe
    from shoal.state.files import write
    from shoal.state.text import text_of

    state = describe("it was asked for")
    text = text_of(state)
    files = () if path is None else write(state, text, str(path))
    return Dump(state, text, files)


def heed_signal() -> None:
    """From now on the signal that `SHOAL_DUMP_SIGNAL` names, if any, makes this process write.

    Raises:
        UsageError: it names none that can be had.
    """
    if not os.environ.get("SHOAL_DUMP_SIGNAL"):
        return
    from shoal.state.watch import call_at, signal_of

    wanted = signal_of(os.environ)
    if wanted is not None:
        call_at(wanted, lambda: _write_at_signal(wanted.name))


def _write_at_signal(name: str) -> None:
    from shoal.state.document import describe
    from shoal.state.files import pattern_of_job, write
    from shoal.state.text import text_of

    pattern = pattern_of_job()
    if pattern is None:
        _LOG.warning("%s came, and SHOAL_DUMP=off: nothing is written", name)
        return
    state = describe(f"{name} came")
    files = write(state, text_of(state), pattern)
    if files:
        _LOG.warning("%s came: the state of this rank is in %s", name, files[-1])


class Told(Protocol):
    """A native group, or what stands for one that is gone."""

    def take_state_at_deadline(self) -> dict[str, Any] | None:
        """What its mesh could tell just before a deadline ended it; once."""


class AtDeadline:
    """Writes down what a group waited for when a deadline ended it, once."""

    _lock = threading.Lock()
    _last: tuple[int, str] = (0, "")  # groups that end together tell the same
    _n_written = 0

    def __init__(self) -> None:
        self._note: str | None = None

    def note(self, source: ContextSource, native: Told) -> str:
        """Where it was written, in words for the error."""
        with AtDeadline._lock:
            if self._note is None:
                self._note = self._attempt(source, native)
            return self._note

    def _attempt(self, source: ContextSource, native: Told) -> str:
        try:
            return self._write(source, native)
        except Exception as error:  # noqa: BLE001 - the error that is being told matters more
            _LOG.exception("the state of this process cannot be told")
            return f"what it waited for could not be written: {error!r}"

    @staticmethod
    def _write(source: ContextSource, native: Told) -> str:
        from shoal.state.document import describe
        from shoal.state.files import pattern_of_job, write
        from shoal.state.text import text_of

        pattern = pattern_of_job()
        told = native.take_state_at_deadline()
        if told is None or pattern is None:
            return ""
        if told["taken_ns"] == AtDeadline._last[0]:
            return AtDeadline._last[1]
        if AtDeadline._n_written == _MOST_AT_DEADLINES:
            return f"not written: {_MOST_AT_DEADLINES} deadlines before left files already"
        AtDeadline._n_written += 1
        state = describe("a deadline passed", {source: told})
        files = write(state, text_of(state), pattern)
        note = (
            f"what it waited for is in {files[-1]}"
            if files
            else "what it waited for could not be written"
        )
        AtDeadline._last = told["taken_ns"], note
        return note


def _after_fork_in_child() -> None:
    # Another thread of the parent may have held it.
    AtDeadline._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork_in_child)
