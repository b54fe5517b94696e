"""An all-reduce in two parts: the servers' in the pool's mesh, the workers' in the world's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol, cast

from shoal.engine import Fault
from shoal.group.work import COMPLETIONS, FOR_EVER_S, Work, follow

if TYPE_CHECKING:
    from shoal.engine import Call
    from shoal.group.group import Group
    from shoal.group.pool.view import View
    from shoal.shapes import Shape

# The native core sees to the deadline of the workers' part, and tells all workers of it.
_GRACE_S: Final = 0.5

NativeError = tuple[Fault, int, str, str]
FINE: Final[NativeError] = (Fault.NONE, -1, "", "")


class Keeper(Protocol):
    """Settles calls whose servers are lost."""

    def await_settled(self, call: ServedCall, until: float) -> bool:
        """Wait for its outcome until then; whether it is there."""

    def is_settled(self, call: ServedCall) -> bool:
        """Whether its outcome is there; if not, somebody is about to see to it."""

    def on_settled(self, call: ServedCall, callback: Callable[[], None]) -> None:
        """Call back once its outcome is there, at once if it is."""

    def expire(self, call: ServedCall) -> None:
        """Its deadline has passed: end the group."""


class ServedCall:
    """One of them, with the face of a native call. Over when both parts are, or were mended.

    Attributes:
        number: of the call among all that may be served.
        until: its deadline, on this process's monotonic clock.
        subject: what it is for, on which ranks agree.
        began_ns: when it was made, on that of the native core, which is the same.
        workers: the workers' part; None if they have none.
        servers: the servers' part; None if the view had ended before it was made.
        is_mending: the pool's thread reads and writes its memory.
        is_mended: what the servers left undone is done.
        outcome: why it failed; None as long as the parts say it all.
    """

    __slots__ = (
        *("number", "shape", "address", "until", "subject", "workers", "servers", "outcome"),
        *("view", "keeper", "is_mending", "is_mended", "began_ns"),
    )

    def __init__(
        self,
        keeper: Keeper,
        view: View,
        number: int,
        shape: Shape,
        address: int,
        until: float,
        subject: int = 0,
    ) -> None:
        self.keeper, self.view = keeper, view
        self.number, self.shape, self.address, self.until = number, shape, address, until
        self.subject = subject
        self.workers: Call | None = None
        self.servers: Call | None = None
        self.is_mending = self.is_mended = False
        self.began_ns = time.monotonic_ns()
        self.outcome: NativeError | None = None

    @property
    def expires_at(self) -> float:
        """When it is too late for it, and its workers' part has not found that out itself."""
        return self.until + _GRACE_S

    @property
    def is_whole(self) -> bool:
        """Whether the servers' part has ended well, or was mended."""
        return self.is_mended or (self.servers is not None and self.servers.succeeded())

    @property
    def is_fine(self) -> bool:
        """Whether all of it has ended well."""
        return self.is_whole and (self.workers is None or self.workers.succeeded())

    @property
    def are_parts_over(self) -> bool:
        """Whether nothing touches its memory any more, unless it has yet to be mended."""
        return (
            not self.is_mending
            and (self.workers is None or self.workers.done())
            and (self.servers is None or self.servers.done())
        )

    # The face of a native call.

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self.is_fine or (self.outcome is not None and self.are_parts_over) or self._look()

    def _look(self) -> bool:
        self._end_servers_with_workers()
        return self.are_parts_over and self.keeper.is_settled(self)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ends in that time."""
        until = time.monotonic() + timeout_s
        if self.workers is not None and not self.workers.wait(timeout_s):
            return False
        self._end_servers_with_workers()
        while self.servers is not None:
            now = time.monotonic()
            if self.servers.wait(max(0.0, min(until, self._expires_at()) - now)):
                break
            if time.monotonic() < self._expires_at():
                return False  # NOT whether it has ended since: then it may have to be mended first
            self.keeper.expire(self)
        return self.is_fine or self.keeper.await_settled(self, until)

    def succeeded(self) -> bool:
        """Whether it has ended, and well."""
        return self.is_fine

    @property
    def finished_ns(self) -> int:
        """When the later of its parts had ended; 0 while one runs."""
        parts = [part.finished_ns for part in (self.workers, self.servers) if part is not None]
        return max(parts) if parts and all(parts) else 0

    def error(self) -> NativeError:
        """Why it failed, if it did."""
        if self.outcome is not None:
            return self.outcome
        return FINE if self.workers is None else self.workers.error()

    def source(self) -> int:
        """It is no message."""
        return -1

    # Its end.

    def _expires_at(self) -> float:
        return self.expires_at if self.outcome is None else FOR_EVER_S

    def _end_servers_with_workers(self) -> None:
        """The world has ended: the servers' part would go on to write to the memory."""
        workers, servers = self.workers, self.servers
        if workers is None or servers is None or not workers.done() or workers.succeeded():
            return
        if not servers.done():
            self.view.abort("the group of the workers has ended")


class ServedWork(Work):
    """The Work of a pooled call."""

    __slots__ = ()

    def __init__(self, group: Group, call: ServedCall, owners: object) -> None:
        super().__init__(group, cast("Call", call), owners)

    def on_done(self, callback: Callable[[Work], None]) -> None:
        """As `Work.on_done`."""
        call = cast("ServedCall", self._call)
        parts: list[Work] = []
        if call.workers is not None:
            parts.append(Work(self._group, call.workers, None))
        if call.servers is not None:
            parts.append(Work(call.view.group, call.servers, None))
        _after(parts, lambda: call.keeper.on_settled(call, lambda: COMPLETIONS.add(self, callback)))


def _after(parts: list[Work], then: Callable[[], None]) -> None:
    """Once each of them has ended, one after the other."""
    if not parts:
        then()
        return
    follow(parts[0], lambda _work: _after(parts[1:], then))
