"""A call in flight, and the thread that tells callbacks about its end."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from shoal.errors import ShoalError, TimedOut

if TYPE_CHECKING:
    from shoal.engine import Call

# Longer than any call: the call's own deadline ends the wait.
_FOR_EVER_S: Final = 3e9


class Origin(Protocol):
    """The group of a call, as its Work needs it."""

    def error_from(self, native: tuple[int, int, str, str]) -> ShoalError | None:
        """The exception that a native error stands for."""


class Work:
    """One collective that has been started. Its buffers are borrowed until it is done."""

    __slots__ = ("_call", "_group", "_owners")

    def __init__(self, group: Origin, call: Call, owners: object) -> None:
        self._group = group
        self._call = call
        self._owners = owners

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when the result is there; the waiting thread does the work meanwhile.

        Args:
            timeout_s: seconds for this wait; None waits until the call's own deadline.

        Raises:
            TimedOut: this wait was too short, and the call goes on; or the call's own deadline
                passed, and the group has ended.
            PeerLost, UsageError, Closed: the group has ended; the buffers are partly folded.
            KeyboardInterrupt: the call goes on.
        """
        if not self._call.wait(_FOR_EVER_S if timeout_s is None else timeout_s):
            raise TimedOut(f"waited {timeout_s} s for a call on {self._group}; it goes on")
        self._owners = None
        error = self.error()
        if error is None:
            return
        try:
            raise error
        finally:
            del error  # it keeps this frame: as a cycle they would keep the buffers too

    def done(self) -> bool:
        """Whether the call has ended, well or not."""
        ended = self._call.done()
        if ended:
            self._owners = None  # whoever keeps this object need not keep the buffers
        return ended

    @property
    def source(self) -> int | None:
        """Of a receive that is done: the rank of the group that the message came from."""
        source = self._call.source()
        return source if source >= 0 else None

    def drive(self, timeout_s: float) -> bool:
        """Help for a while; whether the call has ended. Raises nothing of the call's own."""
        return self._call.wait(timeout_s)

    def error(self) -> ShoalError | None:
        """Why it failed; None while it runs and when it went well."""
        return self._group.error_from(self._call.error())

    def on_done(self, callback: Callable[[Work], None]) -> None:
        """Run `callback(self)` on shoal's completion thread once the call has ended.

        Callbacks must not wait for collectives. What they raise is logged.
        """
        COMPLETIONS.add(self, callback)


_LOG: Final = logging.getLogger("shoal")

_Pending = tuple[Work, Callable[[Work], None]]


def _run_callback(work: Work, callback: Callable[[Work], None]) -> None:
    try:
        callback(work)
    except Exception:  # noqa: BLE001 - it is the user's code, and the thread serves others too
        _LOG.exception("a callback of a finished call failed")


class _Completions:
    """One thread per process that drives calls with callbacks; it ends when it has none left."""

    _POLL_S: Final = 0.05  # how late a callback may be when calls end out of order
    _LINGER_S: Final = 1.0  # the thread waits this long for more before it ends
    _LAST_WAIT_S: Final = 5.0  # the program's end waits this long for callbacks

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, work: Work, callback: Callable[[Work], None]) -> None:
        with self._lock:
            self._queue.put((work, callback))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="shoal-completions", daemon=True
                )
                self._thread.start()

    def finish(self) -> None:
        """Run the callbacks of all calls that have ended, and end the thread."""
        thread = self._thread
        if thread is not None:
            self._queue.put(None)
            thread.join(self._LAST_WAIT_S)

    def forget_thread(self) -> None:
        """After fork: the child has none, and none of the parent's calls."""
        self._queue = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread = None

    def _run(self) -> None:
        pending: list[_Pending] = []
        while self._take(pending):
            pending[0][0].drive(self._POLL_S)
            ended = [entry for entry in pending if entry[0].done()]
            pending = [entry for entry in pending if entry not in ended]
            for work, callback in ended:
                _run_callback(work, callback)

    def _take(self, pending: list[_Pending]) -> bool:
        """Move what was added to `pending`; False, and the thread is gone, if there is nothing."""
        try:
            added = self._queue.get(timeout=0 if pending else self._LINGER_S)
            while added is not None:
                pending.append(added)
                added = self._queue.get_nowait()
        except queue.Empty:
            pass
        if pending:
            return True
        with self._lock:
            if not self._queue.empty():
                return self._take(pending)
            self._thread = None
            return False


COMPLETIONS: Final = _Completions()
