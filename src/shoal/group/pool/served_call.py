"""A served all-reduce: the servers' part in a view's mesh, the workers' part in the world's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from shoal.engine import Fault
from shoal.group.work import COMPLETIONS, FOR_EVER_S, Work, follow

if TYPE_CHECKING:
    from shoal.engine import Call
    from shoal.group.group import Group
    from shoal.group.pool.pool import Pool
    from shoal.group.pool.rail_call import RailCall
    from shoal.group.pool.rails import Posting
    from shoal.group.pool.view import View
    from shoal.shapes import Shape

# The native core ends the workers' part at its deadline, and reports that to all workers.
_GRACE_S: Final = 0.5
_LOOK_S: Final = 0.05  # a waiting thread's interval for checking whether the workers' group lives

NativeError = tuple[Fault, int, str, str]
FINE: Final[NativeError] = (Fault.NONE, -1, "", "")


class ServedCall:
    """A call with the methods of a native call. It ends when both parts have ended or were mended.

    Attributes:
        pool: its thread mends the call if a server is lost.
        number, address, until, subject: see `Posting`.
        shape: of the servers' part, or of the workers' part if servers have none.
        workers: the workers' part, or None.
        servers: the servers' part; None if the view had ended before the call was made.
        is_mending: True while the pool's thread reads and writes the call's memory.
        is_mended: True once the workers have completed the servers' part.
        outcome: the error of a failed call, unless only its workers' part failed.
    """

    __slots__ = (
        *("number", "shape", "address", "until", "subject", "workers", "servers", "outcome"),
        *("view", "pool", "is_mending", "is_mended"),
    )

    def __init__(self, pool: Pool, view: View, posting: Posting, shape: Shape) -> None:
        self.pool, self.view, self.shape = pool, view, shape
        _, self.number, self.address, self.until, self.subject = posting
        self.workers: Call | None = None
        self.servers: Call | None = None
        self.is_mending = self.is_mended = False
        self.outcome: NativeError | None = None

    @property
    def expires_at(self) -> float:
        """The time by which the workers' part has reported that the call is late."""
        return self.until + _GRACE_S

    @property
    def is_whole(self) -> bool:
        """True once the servers' part has succeeded or was mended."""
        return self.is_mended or (self.servers is not None and self.servers.succeeded())

    @property
    def is_fine(self) -> bool:
        """True once both parts have succeeded."""
        return self.is_whole and (self.workers is None or self.workers.succeeded())

    @property
    def are_parts_over(self) -> bool:
        """True once nothing but mending may touch the call's memory."""
        return (
            not self.is_mending
            and (self.workers is None or self.workers.done())
            and (self.servers is None or self.servers.done())
        )

    # The methods of a native call.

    def done(self) -> bool:
        """Return True if the call has ended, also with an error."""
        if self.is_fine or (self.outcome is not None and self.are_parts_over):
            return True
        self._end_servers_with_workers()
        return self.are_parts_over and self.is_settled()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds; return True if the call has ended."""
        until = time.monotonic() + timeout_s
        if self.workers is not None and not self.workers.wait(timeout_s):
            return False
        self._end_servers_with_workers()
        while self.servers is not None:
            expires_at = self.expires_at if self.outcome is None else FOR_EVER_S
            if self.servers.wait(max(0.0, min(until, expires_at) - time.monotonic())):
                break
            if time.monotonic() < expires_at:
                return False  # NOT `done()`: the call may have to be mended first
            self.pool.expire(self)
        return self.is_fine or self._await_settled(until)

    def succeeded(self) -> bool:
        """Return True if the call has succeeded."""
        return self.is_fine

    @property
    def finished_ns(self) -> int:
        """The time at which the later part ended; 0 while a part runs."""
        parts = [part.finished_ns for part in (self.workers, self.servers) if part is not None]
        return max(parts) if parts and all(parts) else 0

    def error(self) -> NativeError:
        """Return the call's error, if it failed."""
        if self.outcome is not None:
            return self.outcome
        return FINE if self.workers is None else self.workers.error()

    def source(self) -> int:
        """Return -1: the call is not a message."""
        return -1

    def on_over(self, callback: Callable[[], None]) -> None:
        """Run the callback when the call has ended, at once if it has already."""
        parts = [(self.pool.control, self.workers), (self.view.group, self.servers)]
        works = [Work(group, part, []) for group, part in parts if part is not None]
        _after(works, lambda: self.pool.on_settled(self, callback))

    # Its end.

    def is_settled(self) -> bool:
        """Return True if the outcome is known; if not, the pool's thread must mend the call."""
        if self.is_fine:
            return True
        pool, workers = self.pool, self.workers
        with pool.changed:  # or the thread might begin to mend a call that has ended for its caller
            if self.is_mending:
                return False
            if self.outcome is None:
                if workers is not None and workers.done() and not workers.succeeded():
                    self.outcome = workers.error()
                elif pool.has_ended and self.are_parts_over:
                    self.outcome = pool.end_of_world()
            return self.outcome is not None

    def _await_settled(self, until: float) -> bool:
        while not self.is_settled():
            now = time.monotonic()
            if now >= until:
                return False
            if now >= self.expires_at and self.outcome is None:
                self.pool.expire(self)
                continue
            self.pool.look(self)
            with self.pool.changed:
                if not self.is_settled():
                    self.pool.changed.wait(min(until - now, _LOOK_S))
        return True

    def _end_servers_with_workers(self) -> None:
        """End the servers' part if the workers' part failed, so that it stops writing to memory."""
        workers, servers = self.workers, self.servers
        if workers is None or servers is None or not workers.done() or workers.succeeded():
            return
        if not servers.done():
            self.view.group.abort("the group of the workers has ended")


class ServedWork(Work):
    """The Work of a served call, or of a call in pieces."""

    __slots__ = ()

    def __init__(self, group: Group, call: ServedCall | RailCall, lent: list[object]) -> None:
        super().__init__(group, cast("Call", call), lent)

    def on_done(self, callback: Callable[[Work], None]) -> None:
        """As `Work.on_done`."""
        call = cast("ServedCall", self._call)
        call.on_over(lambda: COMPLETIONS.add(self, callback))


def _after(works: list[Work], then: Callable[[], None]) -> None:
    """Call `then` once all works have ended."""
    if not works:
        then()
        return
    follow(works[0], lambda _work: _after(works[1:], then))
