"""An all-reduce where several workers share a host: each piece goes through its stages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, cast

from shoal.engine import Fault
from shoal.errors import Closed, ShoalError, TimedOut
from shoal.group.pool.rails import Stage
from shoal.group.pool.served_call import FINE
from shoal.group.work import COMPLETIONS, Work, follow

if TYPE_CHECKING:
    from shoal.engine import Call
    from shoal.group.group import Group
    from shoal.group.pool.served_call import NativeError

_LAST: Final = Stage.TELL

Post = Callable[[int, Stage], Work]
"""Starts one stage of a piece."""


class _Passage:
    """How far a piece has come."""

    __slots__ = ("goes_on", "part", "stage")

    def __init__(self, part: Call) -> None:
        self.stage = Stage.FOLD
        self.part = part  # what is done to it now
        self.goes_on = False  # somebody begins its next stage


class RailCall:
    """One of them, with the face of a native call.

    It goes on by itself: whoever sees a stage end begins the next, a thread that waits or that of
    the callbacks. The group's end ends all stages, and what ends one ends the group.

    Args:
        post: begins a stage.
        fail: ends the group, with the reason.
    """

    def __init__(self, n_pieces: int, post: Post, fail: Callable[[NativeError], None]) -> None:
        # Until it is over: they have a hold on the group.
        self._post: Post | None = post
        self._fail: Callable[[NativeError], None] | None = fail
        self._lock = threading.Lock()
        self._went_on = threading.Condition(self._lock)
        self._is_over = False
        self._waiters: list[Callable[[], None]] = []
        self._outcome: NativeError | None = None
        self._pieces: list[_Passage] = []
        for at, work in enumerate([*self._begin(n_pieces)]):
            self._follow(at, work)

    # The face of a native call.

    def done(self) -> bool:
        """Whether it has ended, well or not. NOT waiting for a lock, which others may hold long."""
        return self._is_over or self._look(blocking=False)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ends in that time."""
        until = time.monotonic() + timeout_s
        while not self._is_over:
            running = next(
                (at for at, one in enumerate(self._pieces) if self._is_under_way(one)), -1
            )
            if running < 0:
                self._look(blocking=True)
                continue
            one, left_s = self._pieces[running], max(0.0, until - time.monotonic())
            if not one.part.wait(left_s) or not self._await_next(one, until):
                return False
            self._advance(running)
        return True

    def _await_next(self, one: _Passage, until: float) -> bool:
        """Whether whoever begins the next stage of a piece, if anyone does, has done so by then."""
        with self._lock:
            return self._went_on.wait_for(
                lambda: not one.goes_on, max(0.0, until - time.monotonic())
            )

    def succeeded(self) -> bool:
        """Whether it has ended, and well."""
        return self.done() and self._outcome is None

    def error(self) -> NativeError:
        """Why it failed, if it did."""
        return self._outcome or FINE

    def source(self) -> int:
        """It is no message."""
        return -1

    @property
    def finished_ns(self) -> int:
        """When its last stage had ended; 0 while it runs."""
        return max(one.part.finished_ns for one in self._pieces) if self.done() else 0

    def on_over(self, callback: Callable[[], None]) -> None:
        """Call back when it has ended, at once if it has."""
        with self._lock:
            if not self._is_over:
                self._waiters.append(callback)
                return
        callback()

    # Its way.

    def _is_under_way(self, one: _Passage) -> bool:
        if one.goes_on or not one.part.done():
            return True
        return self._outcome is None and one.stage is not _LAST

    def _begin(self, n_pieces: int) -> Iterator[Work]:
        assert self._post is not None
        for at in range(n_pieces):
            try:
                work = self._post(at, Stage.FOLD)
            except (ShoalError, MemoryError, RuntimeError):
                if at == 0:
                    raise  # nothing has moved
                self._end((Fault.CLOSED, -1, "a piece of it could not be made", ""))
                return
            self._pieces.append(_Passage(work._call))
            yield work

    def _follow(self, at: int, work: Work) -> None:
        """Go on when what is done to a piece now has ended, whoever waits."""
        follow(work, lambda _work: self._advance(at))

    def _advance(self, at: int) -> None:
        one, work = self._pieces[at], None
        while self._may_go_on(one):
            work = self._go_on(at, one) or work
        if work is not None:
            self._follow(at, work)
        self._look(blocking=True)

    def _may_go_on(self, one: _Passage) -> bool:
        """Whether its stage has ended well, another comes, and nobody else sees to that."""
        with self._lock:
            if self._outcome is not None or one.goes_on or not one.part.done():
                return False
            if not one.part.succeeded():
                self._end(one.part.error())
                return False
            one.goes_on = one.stage is not _LAST
            return one.goes_on

    def _go_on(self, at: int, one: _Passage) -> Work | None:
        """Begin its next stage. NOT locked: that may wait until it is known who serves it."""
        assert self._post is not None
        stage, work = Stage(one.stage + 1), None
        error: NativeError = Fault.CLOSED, -1, "its next stage was interrupted", ""
        try:
            work = self._post(at, stage)
        except TimedOut as late:
            error = Fault.TIMED_OUT, -1, str(late), ""
        except (ShoalError, MemoryError, RuntimeError) as failed:
            fault = Fault.CLOSED if isinstance(failed, Closed) else Fault.RESOURCE
            error = fault, -1, str(failed), ""
        finally:
            self._went(one, stage, work, error)
        return work

    def _went(self, one: _Passage, stage: Stage, work: Work | None, error: NativeError) -> None:
        with self._lock:
            if work is None:
                self._end(error)
            else:
                # The stage last: whoever sees the new one with the old part takes that for its end.
                one.part = work._call
                one.stage = stage
            one.goes_on = False
            self._went_on.notify_all()

    def _end(self, error: NativeError) -> None:
        """Holds the lock. What failed first counts."""
        if self._outcome is not None:
            return
        self._outcome = error
        if self._fail is not None:
            self._fail(error)

    def _look(self, *, blocking: bool) -> bool:
        """Whether it is over; if it is, whoever waits for that is told."""
        if not self._lock.acquire(blocking):
            return False
        try:
            if not self._is_over:
                if any(self._is_under_way(one) for one in self._pieces):
                    return False
                failed = next((one for one in self._pieces if not one.part.succeeded()), None)
                if self._outcome is None and failed is not None:
                    self._end(failed.part.error())
                self._is_over, self._post, self._fail = True, None, None
            waiters, self._waiters = self._waiters, []
        finally:
            self._lock.release()
        for callback in waiters:
            callback()
        return True


class RailWork(Work):
    """The Work of such a call."""

    __slots__ = ()

    def __init__(self, group: Group, call: RailCall, owners: object) -> None:
        super().__init__(group, cast("Call", call), owners)

    def on_done(self, callback: Callable[[Work], None]) -> None:
        """As `Work.on_done`."""
        call = cast("RailCall", self._call)
        call.on_over(lambda: COMPLETIONS.add(self, callback))
