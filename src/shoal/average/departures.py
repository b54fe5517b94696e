"""One step's buffers on their way: each leaves when it is full, and is matched by its number."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, Protocol

from shoal.average.lacking import GO_ON, MARK, reason_of
from shoal.dtypes import DType, Op
from shoal.errors import Closed, TimedOut, UsageError
from shoal.group.buffers import BufferView

if TYPE_CHECKING:
    from shoal.average.layout import Layout
    from shoal.average.memory import ArrayMemory
    from shoal.group.group import Group
    from shoal.group.subjects import Subject


class Started(Protocol):
    """A call that was started: shoal's `Work`, or what a `Send` of yours returns."""

    def wait(self) -> None:
        """Return when the buffer is averaged; raise why it never will be."""


Send = Callable[[int, BufferView], Started]
"""Averages a buffer over all ranks, in place, given its number and its memory; must not wait.

The memory is the averager's; it may be used until the `wait` of what is returned has returned.
"""

# So many priorities buffers have, below those of all other calls. Each keeps plans of its own.
_N_LEVELS: Final = 32

_NO_WAIT: Final = (0, 0)


class Departures:
    """Sends the buffers of a layout, a step at a time. Has no hold on who counts them.

    Args:
        wire: as for `Group.all_reduce`.
        subject: what ranks compare, with the step and the buffer.
    """

    def __init__(self, group: Group, wire: str | None, subject: Subject) -> None:
        self._group = group
        self._wire = wire
        self._subject = subject
        self._numbers = range(0)
        self.open: set[int] = set()  # of these, those that may yet be used
        self.send_with: Send | None = None  # in place of the group's all-reduce
        self.lets_last_overtake = False  # the later a buffer is full, the sooner it is needed
        self.on_full: Callable[[int], None] | None = None  # called before a buffer leaves
        self.prepare: Callable[[int], None] | None = None  # and then this

    def lay_out(self, layout: Layout, memory: ArrayMemory) -> None:
        """Send the buffers of another layout; none is on its way."""
        self._layout = layout
        self.spans = [memory.buffer(number) for number in range(len(layout.buffers))]
        self._clear()

    def begin(self) -> None:
        """A step begins."""
        self._clear()
        self._numbers = range(0)

    def reserve(self) -> range:
        """The numbers of this step; with the first call every rank is at this place among its own.

        The first that leaves or is skipped makes it, where nothing else has.
        """
        if not self._numbers and self.send_with is None:
            self._numbers = self._group.reserve(len(self._layout.buffers))
            self.open.update(self._numbers)
            self._subject.step += 1
        return self._numbers

    def cancel(self) -> None:
        """What has not left in this step never will, on any rank."""
        while self.open:
            self._group.skip(self.open.pop())

    def _clear(self) -> None:
        n_buffers = len(self._layout.buffers)
        self._works: list[Started | None] = [None] * n_buffers
        self.posted_ns = [0] * n_buffers
        self.done_ns = [0] * n_buffers
        self.waits = [_NO_WAIT] * n_buffers

    def is_sent(self, buffer: int) -> bool:
        """Whether a buffer has left in this step."""
        return self.posted_ns[buffer] != 0

    def send(self, buffer: int) -> None:
        """A buffer is full: average it.

        Raises (the group has ended):
            ShoalError: as `Group.all_reduce`, or why another rank cannot.
        """
        if self.on_full is not None:
            self.on_full(buffer)
        with self.telling():
            if self.prepare is not None:
                self.prepare(buffer)
            self.posted_ns[buffer] = time.monotonic_ns()
            start = self.send_with or self._all_reduce
            self._works[buffer] = start(buffer, self.spans[buffer])

    def skip(self, buffer: int) -> None:
        """No rank sends this buffer in this step."""
        if self.send_with is None:
            number = self.reserve()[buffer]
            self.open.remove(number)
            self._group.skip(number)

    def wait(self, buffer: int) -> None:
        """Return when a buffer is averaged; at once if it has not left in this step.

        Raises (the group has ended):
            ShoalError: as `Work.wait`, or why another rank cannot.
        """
        work = self._works[buffer]
        if work is None:
            return
        since = time.monotonic_ns()
        try:
            with self.telling():
                work.wait()
        except TimedOut as error:
            raise TimedOut(f"{self._told(buffer)}: {error.args[0]}") from error
        until = time.monotonic_ns()
        self._works[buffer] = None
        self.waits[buffer] = (since, until)
        self.done_ns[buffer] = getattr(work, "finished_ns", 0) or until

    def is_over(self, buffer: int) -> bool:
        """Whether `wait` would not wait; False where that cannot be asked."""
        work = self._works[buffer]
        return work is None or bool(getattr(work, "done", lambda: False)())

    def times(self) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """By buffer, as of now: when it left, when it was averaged, when it was waited for."""
        done = [
            _finished_ns(work) if work is not None else since
            for work, since in zip(self._works, self.done_ns, strict=True)
        ]
        return self.posted_ns, done, self.waits

    def give_up(self, why: str) -> NoReturn:
        """End the group on every rank, each of which hears why.

        Raises:
            UsageError: always.
        """
        self._group.abort(MARK + why)
        raise UsageError(f"{self._group}: {why}{GO_ON}")

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Raise a `UsageError` with the reason where the group has ended since a rank gave up."""
        try:
            yield
        except Closed as error:
            reason = reason_of(self._group, error)
            if reason is None:
                raise
            raise reason from error

    def _all_reduce(self, buffer: int, span: BufferView) -> Started:
        number = self.reserve()[buffer]
        self.open.discard(number)
        level = buffer * _N_LEVELS // len(self.spans)
        work = self._group.all_reduce(
            span,
            Op.SUM if span.dtype is DType.FLOAT16 else Op.AVG,  # that was divided: see Preparation
            wire=self._wire if span.dtype is DType.FLOAT32 else None,
            number=number,
            subject=self._subject.of(buffer),
            priority=level - _N_LEVELS if self.lets_last_overtake else 0,
            async_op=True,
        )
        assert work is not None  # it is in the background
        return work

    def _told(self, buffer: int) -> str:
        """A buffer, for messages."""
        held = words_for(
            [self._layout.entries[i].name for i in self._layout.buffers[buffer].entries]
        )
        return f"fusion buffer {buffer} of {len(self._layout.buffers)} ({held})"


def words_for(names: Sequence[str]) -> str:
    """Arrays in words: the first and the last."""
    return " to ".join(map(repr, dict.fromkeys((names[0], names[-1])))) if names else "no array"


def _finished_ns(work: Any) -> int:
    """When a call that nobody waited for yet has ended well; 0: it has not, or nobody knows."""
    error = getattr(work, "error", None)
    return 0 if error is None or error() is not None else work.finished_ns
