"""A call in flight, and the thread that runs callbacks at its end."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from shoal.errors import ShoalError, TimedOut
from shoal.threads import start

if TYPE_CHECKING:
    from shoal.engine import Call, Mesh
    from shoal.group.calls import Calls

# Longer than any call: the call's own deadline ends the wait.
FOR_EVER_S: Final = 3e9

# A call that has waited this long logs the ranks that are late to it. Saving a checkpoint on one
# rank usually takes less. Tests inject another value.
LATE_S = 10.0

# A call and the owners of its buffers (see `Work`). Does not refer to the group.
Loan = tuple["Call", list[object]]


def wait_long(group: Calls, call: Call, timeout_s: float) -> bool:
    """Wait like `call.wait`, and log the ranks that are late to the call."""
    while timeout_s > LATE_S:
        if call.wait(LATE_S):
            return True
        warn_of_late(group.native_id, LATE_S)
        timeout_s -= LATE_S
    return call.wait(timeout_s)


def warn_of_late(native_id: int | None, late_s: float) -> None:
    """Call `warn_of_late` of state/late.py, a module that loads with the first late rank."""
    from shoal.state.late import warn_of_late as warn

    warn(native_id, late_s)


class Work:
    """A call that has been started. Its buffers are borrowed until it is done.

    Dropping it does not end the call: the group keeps the buffers alive until then. Closing the
    group does, and so does the end of the program: other ranks in the call get `PeerLost`.

    Args:
        lent: the owners of the buffers; emptied when the call is known to be done.
    """

    __slots__ = ("_call", "_group", "_lent")

    def __init__(self, group: Calls, call: Call, lent: list[object]) -> None:
        self._group = group
        self._call = call
        self._lent = lent

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the result; the waiting thread does the work meanwhile.

        Args:
            timeout_s: seconds for this wait; None waits until the call's own deadline.

        Raises:
            TimedOut: `timeout_s` passed, and the call goes on; or the call's own deadline passed,
                and the group has ended.
            PeerLost, UsageError, Closed, ShoalError: the group has ended; the buffers may be partly
                folded. UsageError also if a call of the same name was in flight already; then the
                group is usable.
            KeyboardInterrupt: the call goes on, and its buffers stay borrowed.
        """
        if not wait_long(self._group, self._call, FOR_EVER_S if timeout_s is None else timeout_s):
            raise TimedOut(f"waited {timeout_s:g} s for a call on {self._group}; it goes on")
        self._lent.clear()
        error = self.error()
        if error is None:
            return
        try:
            raise error
        finally:
            del error  # it refers to this frame: the cycle would keep the buffers alive

    def done(self) -> bool:
        """Return True if the call has ended, also with an error."""
        ended = self._call.done()
        if ended:
            self._lent.clear()  # a caller that keeps this object does not keep the buffers alive
        return ended

    def finish_at_close(self) -> None:
        """Make closing the links wait for this call, which no caller waits for: 12 s for all."""
        self._group.await_at_close(self._call)

    @property
    def mesh(self) -> Mesh | None:
        """The links that the call runs on; None once they are closed."""
        return self._group.mesh

    @property
    def group_id(self) -> int | None:
        return self._group.native_id

    @property
    def source(self) -> int | None:
        """The rank that sent a received message; None for other calls."""
        source = self._call.source()
        return source if source >= 0 else None

    @property
    def finished_ns(self) -> int:
        """The time at which the call ended, by `time.monotonic_ns`; 0 while it runs."""
        return self._call.finished_ns

    def drive(self, timeout_s: float) -> bool:
        """Work on the call for a while; return True if it has ended, also with an error."""
        return self._call.wait(timeout_s)

    def error(self) -> ShoalError | None:
        """Return the call's error; None while it runs and if it succeeded."""
        return None if self._call.succeeded() else self._group.error_from(self._call.error())

    def on_done(self, callback: Callable[[Work], None]) -> None:
        """Run `callback(self)` on shoal's completion thread once the call has ended.

        Callbacks must not wait for collectives; their exceptions are logged. ShoalError if the call
        is still running and no thread can be started to wait for it.
        """
        COMPLETIONS.add(self, callback)


_LOG: Final = logging.getLogger("shoal")

_Entry = tuple[Work, Callable[[Work], None]]


def wait_for_an_end(work: Work, seen: int) -> int:
    """Wait until any call on the mesh of `work`, which is running, has ended or is late.

    Args:
        seen: the last result; -1 at first. Returns at once if calls have ended since.
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
    except Exception:  # noqa: BLE001 - user code; the thread serves other callbacks too
        _LOG.exception("a callback of a finished call failed")


def follow(work: Work, callback: Callable[[Work], None]) -> None:
    """Run `callback(work)` at the end of a call, on shoal's completion thread.

    If the thread cannot be started, the calling thread waits for the call.
    """
    try:
        work.on_done(callback)
    except ShoalError as error:
        _LOG.warning("the calling thread waits for a call: %s", error)
        with contextlib.suppress(ShoalError):
            work.wait()
        callback(work)


class _Completions:
    """Runs the callbacks of calls, on one thread for each mesh that has such calls.

    Calls that had ended before they were added use another thread, under the key `_ENDED`, since
    the threads of meshes wait for the next end.
    """

    _LINGER_S: Final = 1.0  # a thread without calls ends after this time
    _LAST_WAIT_S: Final = 5.0  # for callbacks, at the end of the program
    _ENDED: Final = 0

    def __init__(self) -> None:
        self.forget_threads()

    def forget_threads(self) -> None:
        """Start with no threads and calls, also in a forked child."""
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
                # NOT before `_put`: an end in between would be missed.
                if work.done():
                    self._entries[key].remove(entry)
                    self._put(self._ENDED, entry)
        except ShoalError:  # no thread can be started
            if not work.done():
                raise
            _run_callback(work, callback)

    def finish(self) -> None:
        """Run the callbacks of all calls, which must have ended, and end the threads."""
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()
            threads = list(self._threads)
        deadline = time.monotonic() + self._LAST_WAIT_S
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _put(self, key: int, entry: _Entry) -> None:
        if key not in self._entries:
            # First, since it may raise.
            self._threads.append(start("shoal-completions", self._run, key))
            self._entries[key] = []
        self._entries[key].append(entry)
        self._changed.notify_all()

    def _run(self, key: int) -> None:
        seen = -1
        while self._has_some(key):
            seen = self._serve(key, seen)

    # Only these functions have references to calls, so a thread that waits keeps no group alive.

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
        """Wait a while for calls; return False if none were added: the thread must end."""
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
