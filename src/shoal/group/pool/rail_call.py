"""An all-reduce for hosts with several workers: its pieces go from stage to stage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from shoal.engine import Fault
from shoal.errors import Closed, ShoalError, TimedOut
from shoal.group.pool.rails import Stage
from shoal.group.pool.served_call import FINE
from shoal.group.work import follow

if TYPE_CHECKING:
    from shoal.engine import Call
    from shoal.group.pool.pool import Pool
    from shoal.group.pool.rails import Posting
    from shoal.group.pool.served_call import NativeError
    from shoal.group.work import Work

_LAST: Final = Stage.SHARE


class _Passage:
    """A piece on its way through the stages."""

    __slots__ = ("goes_on", "part", "stage")

    def __init__(self, part: Call) -> None:
        self.stage = Stage.FOLD
        self.part = part  # the native call of this stage
        self.goes_on = False  # a thread is starting its next stage


def _pieces_of(call: Posting, numbers: Sequence[int]) -> Iterator[Posting]:
    """Yield the postings of a call's pieces, which have these numbers."""
    kind = call.kind
    for number, piece in zip(numbers, kind.pieces, strict=True):
        of_piece = kind._replace(n_elems=piece.n_elems, pieces=(), n_pieces=len(numbers))
        yield call._replace(kind=of_piece, number=number, address=call.address + piece.offset)


class RailCall:
    """A call in pieces with these numbers, with the methods of a native call; `pool` posts stages.

    The thread that sees a stage end, in a wait or a callback, starts the next stage. The end of the
    group ends all stages, and a stage that fails ends the group.
    """

    def __init__(self, pool: Pool, posting: Posting, numbers: Sequence[int]) -> None:
        # None once the call is over: the pool keeps the group's links alive.
        self._pool: Pool | None = pool
        self._postings = list(_pieces_of(posting, numbers))
        self._lock = threading.Lock()
        self._went_on = threading.Condition(self._lock)
        self._is_over = False
        self._waiters: list[Callable[[], None]] = []
        self._outcome: NativeError | None = None
        self._pieces: list[_Passage] = []
        for at, work in enumerate([*self._begin(len(numbers))]):
            self._follow(at, work)

    def _post(self, at: int, stage: Stage) -> Work:
        assert self._pool is not None
        return self._pool.post_stage(stage, self._postings[at])

    # The methods of a native call.

    def done(self) -> bool:
        """Return True if it has ended. Does not wait for the lock, which threads may hold long."""
        return self._is_over or self._look(blocking=False)

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds; return True if the call has ended."""
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
        """Wait while a thread starts the next stage; return True once it has started."""
        with self._lock:
            return self._went_on.wait_for(
                lambda: not one.goes_on, max(0.0, until - time.monotonic())
            )

    def succeeded(self) -> bool:
        """Return True if the call has succeeded."""
        return self.done() and self._outcome is None

    def error(self) -> NativeError:
        """Return the call's error, if it failed."""
        return self._outcome or FINE

    def source(self) -> int:
        """Return -1: the call is not a message."""
        return -1

    @property
    def finished_ns(self) -> int:
        """The time at which the last stage ended; 0 while the call runs."""
        return max(one.part.finished_ns for one in self._pieces) if self.done() else 0

    def on_over(self, callback: Callable[[], None]) -> None:
        """Run the callback when the call has ended, at once if it has already."""
        with self._lock:
            if not self._is_over:
                self._waiters.append(callback)
                return
        callback()

    # From stage to stage.

    def _is_under_way(self, one: _Passage) -> bool:
        if one.goes_on or not one.part.done():
            return True
        return self._outcome is None and one.stage is not _LAST

    def _begin(self, n_pieces: int) -> Iterator[Work]:
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
        """Start the next stage of a piece when the current one has ended."""
        follow(work, lambda _work: self._advance(at))

    def _advance(self, at: int) -> None:
        one, work = self._pieces[at], None
        while self._may_go_on(one):
            work = self._go_on(at, one) or work
        if work is not None:
            self._follow(at, work)
        self._look(blocking=True)

    def _may_go_on(self, one: _Passage) -> bool:
        """Return True if its stage has succeeded and this thread must start the next stage."""
        with self._lock:
            if self._outcome is not None or one.goes_on or not one.part.done():
                return False
            if not one.part.succeeded():
                self._end(one.part.error())
                return False
            one.goes_on = one.stage is not _LAST
            return one.goes_on

    def _go_on(self, at: int, one: _Passage) -> Work | None:
        """Start its next stage, NOT locked: this may wait for the workers to agree on servers."""
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
            self._end_step(one, stage, work, error)
        return work

    def _end_step(self, one: _Passage, stage: Stage, work: Work | None, error: NativeError) -> None:
        with self._lock:
            if work is None:
                self._end(error)
            else:
                # NOT the stage first: the last stage with the old part would look like the end.
                one.part = work._call
                one.stage = stage
            one.goes_on = False
            self._went_on.notify_all()

    def _end(self, error: NativeError) -> None:
        """Record the first failure. The caller holds the lock."""
        if self._outcome is not None:
            return
        self._outcome = error
        if self._pool is not None:
            self._pool.end_by_stage(error)

    def _look(self, *, blocking: bool) -> bool:
        """Return True if the call is over; if it is, run its callbacks."""
        if not self._lock.acquire(blocking):
            return False
        try:
            if not self._is_over:
                if any(self._is_under_way(one) for one in self._pieces):
                    return False
                failed = next((one for one in self._pieces if not one.part.succeeded()), None)
                if self._outcome is None and failed is not None:
                    self._end(failed.part.error())
                self._is_over, self._pool = True, None
            waiters, self._waiters = self._waiters, []
        finally:
            self._lock.release()
        for callback in waiters:
            callback()
        return True
