"""A call in flight, and the thread that tells callbacks about its end."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from shoal.errors import ShoalError, TimedOut
from shoal.threads import start

if TYPE_CHECKING:
    from shoal.engine import Call, Fault, Mesh

# Longer than any call: the call's own deadline ends the wait.
FOR_EVER_S: Final = 3e9

# How long a call waits before it is said which rank is late to it, and then again. Sooner than most
# programs save a checkpoint on one rank would be noise. Injected by tests.
LATE_S = 10.0


class Origin(Protocol):
    """The group of a call, as its Work needs it."""

    @property
    def mesh(self) -> Mesh | None:
        """The links that the call runs on; None once they are closed."""

    @property
    def native_id(self) -> int | None:
        """The group's number in the native core; None once it is closed."""

    def error_from(self, native: tuple[Fault, int, str, str]) -> ShoalError | None:
        """The exception that a native error stands for."""


# A call, and what keeps its buffers alive, emptied when it is known to be done. Has no hold on the
# group.
Loan = tuple["Call", list[object]]


def wait_long(group: Origin, call: Call, timeout_s: float) -> bool:
    """As `call.wait`; says who is late to the call meanwhile.

    No timer but the waiting thread's own is behind it, and that thread sleeps in the engine.
    """
    while timeout_s > LATE_S:
        if call.wait(LATE_S):
            return True
        warn_of_late(group.native_id, LATE_S)
        timeout_s -= LATE_S
    return call.wait(timeout_s)


def warn_of_late(native_id: int | None, late_s: float) -> None:
    """See state/late.py, which is loaded for the first rank that is late."""
    from shoal.state.late import warn_of_late as warn

    warn(native_id, late_s)


class Work:
    """One collective that has been started. Its buffers are borrowed until it is done."""

    __slots__ = ("_call", "_group", "_lent", "_owners")

    def __init__(self, group: Origin, call: Call, owners: object) -> None:
        self._group = group
        self._call = call
        self._owners = owners
        self._lent: list[object] | None = None

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
        if not wait_long(self._group, self._call, FOR_EVER_S if timeout_s is None else timeout_s):
            raise TimedOut(f"waited {timeout_s} s for a call on {self._group}; it goes on")
        if self._lent is None:  # the usual case, without a call
            self._owners = None
        else:
            self._lent.clear()
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
            self._let_go()
        return ended

    def lend(self) -> Loan:
        """What has to stay alive until the call is done, for whoever sees to that; once."""
        self._lent = [self._owners]
        self._owners = None
        return self._call, self._lent

    def _let_go(self) -> None:
        """Whoever keeps this object need not keep the buffers."""
        self._owners = None
        if self._lent is not None:
            self._lent.clear()

    @property
    def mesh(self) -> Mesh | None:
        """The links that the call runs on; None once they are closed."""
        return self._group.mesh

    @property
    def group_id(self) -> int | None:
        """The number of its group in the native core."""
        return self._group.native_id

    @property
    def source(self) -> int | None:
        """Of a receive that is done: the rank of the group that the message came from."""
        source = self._call.source()
        return source if source >= 0 else None

    @property
    def finished_ns(self) -> int:
        """When the call ended, by `time.monotonic_ns`, whoever saw it when; 0 while it runs."""
        return self._call.finished_ns

    def drive(self, timeout_s: float) -> bool:
        """Help for a while; whether the call has ended. Raises nothing of the call's own."""
        return self._call.wait(timeout_s)

    def error(self) -> ShoalError | None:
        """Why it failed; None while it runs and when it went well."""
        return None if self._call.succeeded() else self._group.error_from(self._call.error())

    def on_done(self, callback: Callable[[Work], None]) -> None:
        """Run `callback(self)` on shoal's completion thread once the call has ended.

        Callbacks must not wait for collectives. What they raise is logged.

        Raises:
            ShoalError: the call runs, and no thread can be had to wait for it.
        """
        COMPLETIONS.add(self, callback)


_LOG: Final = logging.getLogger("shoal")

_Entry = tuple[Work, Callable[[Work], None]]


def wait_for_an_end(work: Work, seen: int) -> int:
    """Return once any call on the mesh of `work`, which runs, has ended, or is late.

    Args:
        seen: what this returned before; -1 at first. If calls have ended since, it returns at once.
    """
    mesh = work.mesh
    if mesh is None:  # closed, or about to be
        work.drive(FOR_EVER_S)
        return seen
    now = mesh.wait_finished(seen, LATE_S)
    if now == seen:
        warn_of_late(work.group_id, LATE_S)
    return now


def _run_callback(work: Work, callback: Callable[[Work], None]) -> None:
    try:
        callback(work)
    except Exception:  # noqa: BLE001 - it is the user's code, and the thread serves others too
        _LOG.exception("a callback of a finished call failed")


def follow(work: Work, callback: Callable[[Work], None]) -> None:
    """Run `callback(work)` at the end of a call that somebody may wait for.

    On shoal's completion thread; where none can be had, this thread waits for the call.
    """
    try:
        work.on_done(callback)
    except ShoalError as error:
        _LOG.warning("a thread of shoal's waits for one call after the other: %s", error)
        with contextlib.suppress(ShoalError):
            work.wait()
        callback(work)


class _Completions:
    """Runs the callbacks of calls, on a thread for each mesh while it has such calls.

    A thread that waits for the end of a call cannot be told of one that has ended before: those
    have a thread of their own, under the key `_ENDED`.
    """

    _LINGER_S: Final = 1.0  # a thread waits this long for more before it ends
    _LAST_WAIT_S: Final = 5.0  # the program's end waits this long for callbacks
    _ENDED: Final = 0

    def __init__(self) -> None:
        self.forget_threads()

    def forget_threads(self) -> None:
        """At first, and after fork: the child has none, and none of the parent's calls."""
        self._changed = threading.Condition()
        self._entries: dict[int, list[_Entry]] = {}  # by the mesh's id; each has a thread
        self._threads: list[threading.Thread] = []
        self._is_ending = False

    def add(self, work: Work, callback: Callable[[Work], None]) -> None:
        entry = (work, callback)
        key = id(work.mesh)
        try:
            with self._changed:
                self._put(key, entry)
                # NOT looked at before it is put there: it may end meanwhile, and nobody would see.
                if work.done():
                    self._entries[key].remove(entry)
                    self._put(self._ENDED, entry)
        except ShoalError:  # no thread can be had
            if not work.done():
                raise
            _run_callback(work, callback)

    def finish(self) -> None:
        """Run the callbacks of all calls, which have ended, and end the threads."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
            threads = list(self._threads)
        deadline = time.monotonic() + self._LAST_WAIT_S
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _put(self, key: int, entry: _Entry) -> None:
        if key not in self._entries:
            # First: it raises where no thread can be had.
            self._threads.append(start("shoal-completions", self._run, key))
            self._entries[key] = []
        self._entries[key].append(entry)
        self._changed.notify_all()

    def _run(self, key: int) -> None:
        seen = -1
        while self._has_some(key):
            seen = self._serve(key, seen)

    # What names a call ends with these: a thread that waits for more keeps no group alive.

    def _serve(self, key: int, seen: int) -> int:
        self._run_ended(key)
        with self._changed:
            running = [work for work, _ in self._entries[key][:1]]
        return wait_for_an_end(running[0], seen) if running else -1

    def _run_ended(self, key: int) -> None:
        running: list[_Entry] = []
        ended: list[_Entry] = []
        with self._changed:
            for entry in self._entries[key]:
                (ended if entry[0].done() else running).append(entry)
            self._entries[key] = running
        for work, callback in ended:
            _run_callback(work, callback)

    def _has_some(self, key: int) -> bool:
        """Whether there are calls; waits a while for them. If not, the thread is to end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._entries[key] or self._is_ending, timeout=self._LINGER_S
            )
            if self._entries[key]:
                return True
            del self._entries[key]
            self._threads.remove(threading.current_thread())
            return False


COMPLETIONS: Final = _Completions()
