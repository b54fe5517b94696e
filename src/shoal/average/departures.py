"""Sends the fusion buffers of a step: each as soon as it is full, matched by its number."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from shoal.average.lacking import explaining
from shoal.dtypes import DType, Op
from shoal.errors import ShoalError, TimedOut

if TYPE_CHECKING:
    from shoal.average.feedback import Feedback
    from shoal.average.layout import Layout
    from shoal.average.memory import ArrayMemory
    from shoal.average.preparing import Preparation
    from shoal.codec import Codec
    from shoal.group.group import Group
    from shoal.group.subjects import Subject
    from shoal.group.work import Work

_NO_WAIT: Final = (0, 0)


class Departures:
    """Sends the buffers of a layout, a step at a time. Does not keep its averager alive.

    Args:
        wire: see `Group.all_reduce`.
        fill: called with arrays before their buffer is sent; None: they hold their values already.
        feedback: rounds float32 buffers before they are sent, and chooses their wire; None: no
            residuals.
        finds_unused: every step calls `send_used`.

    Attributes:
        fill: may be replaced by a front end that continues in another group.
        subject: the subject of the calls.
        open: the numbers of this step's calls that are still to be made.
        n_steps: the number of steps with a call, including the current step.
    """

    def __init__(
        self,
        wire: str | None,
        fill: Callable[[Sequence[int]], None] | None,
        feedback: Feedback | None = None,
        *,
        finds_unused: bool,
    ) -> None:
        self._wire = wire
        self.fill = fill
        self._feedback = feedback
        self._finds_unused = finds_unused
        self._works: list[Work | None] = []
        self._numbers = range(0)
        self.open: set[int] = set()
        self.n_steps = 0

    def join(self, group: Group, subject: Subject, preparation: Preparation | None) -> None:
        """Send in this group from now on; `lay_out` is called next.

        Args:
            subject: identifies the averager; ranks compare it, with the step and the buffer.
            preparation: changes a buffer before it is sent, after `fill` and before the feedback.
        """
        self._group = group
        self.subject = subject
        self._preparation = preparation
        self._has_weights = preparation is not None and preparation.is_weighted
        self._n_ahead = self._has_weights + self._finds_unused
        self._used = self._kept_used = b""

    def lay_out(self, layout: Layout, memory: ArrayMemory) -> None:
        """Send the buffers of another layout from now on; no buffer is in flight."""
        self._layout, self._memory = layout, memory
        self._spans = [memory.buffer(number) for number in range(len(layout.buffers))]
        self.begin()

    def begin(self) -> None:
        """Begin a step."""
        n_buffers = len(self._layout.buffers)
        self._numbers = range(0)
        self._works = [None] * n_buffers
        self._posted_ns = [0] * n_buffers
        self._done_ns = [0] * n_buffers
        self._waits = [_NO_WAIT] * n_buffers
        if self._feedback is not None:
            self._feedback.begin()

    def reserve(self) -> range:
        """Return the numbers of the buffers' calls; the first use in a step reserves them.

        Every rank makes that first use at the same place among its own calls. The weight's call
        and the call that finds unused arrays have the first numbers. So if ranks are in steps of
        different averagers, these calls meet and the mismatch is detected, even if the steps have
        different numbers of buffers.
        """
        if self.is_reserved:
            return self._numbers[self._n_ahead :]
        with explaining(self._group):
            n_buffers = len(self._layout.buffers)
            self._numbers = self._group.reserve(self._n_ahead + n_buffers)
            self.open.update(self._numbers)
            self.subject.step += 1
            self.n_steps += 1
            if self._preparation is not None and self._has_weights:
                self._preparation.send_weight(*self._ahead(0))
        return self._numbers[self._n_ahead :]

    @property
    def is_reserved(self) -> bool:
        """True if `reserve` was called since `begin`."""
        return bool(self._numbers)

    @property
    def is_torn(self) -> bool:
        """True if an interrupted `send_rest` has left buffers neither sent nor skipped."""
        each = zip(self._posted_ns, self._works, self._done_ns, strict=False)
        return bool(self.open) or any(
            posted_ns and work is None and not done_ns for posted_ns, work, done_ns in each
        )

    def send_used(self, missing: Sequence[int]) -> tuple[int, ...]:
        """Send the other buffers that have arrays ready on any rank; every rank calls it.

        In these, arrays that are ready only on other ranks count as zero, unless `fill` fills them.

        Args:
            missing: the arrays that are not ready on this rank.

        Returns:
            The arrays that are ready on no rank; their values are set aside in the memory.
        """
        used = bytearray(b"\1" * len(self._layout.entries))
        for index in missing:
            used[index] = 0
        self.reserve()
        if self._kept_used:
            used[:] = self._kept_used
        else:
            number, subject = self._ahead(self._n_ahead - 1)
            with explaining(self._group):
                self._group.all_reduce(used, Op.BOR, number=number, subject=subject)
        self._used = bytes(used)
        if not missing:
            return ()
        if self.fill is None:
            self._memory.clear([index for index in missing if used[index]])
        for at, buffer in enumerate(self._layout.buffers):
            if self._posted_ns[at]:
                continue
            # A buffer with only padding is sent with the last array.
            if any(used[index] for index in buffer.entries or self._layout.order[-1:]):
                self._memory.put_aside(at, [i for i in buffer.entries if not used[i]])
                self.send(at, [i for i in buffer.entries if used[i]])
            else:
                self.open.remove(self._numbers[self._n_ahead + at])
                self._group.skip(self._numbers[self._n_ahead + at])
        return tuple(index for index, is_used in enumerate(used) if not is_used)

    def keep_used(self) -> None:
        """Expect exactly the arrays of the last step from now on; see `Averager.keep_used`."""
        if not self._kept_used:
            self._kept_used, self._n_ahead = self._used, int(self._has_weights)

    def _ahead(self, at: int) -> tuple[int, int]:
        """Return the number and the subject of a call of this step without a buffer."""
        number = self._numbers[at]
        self.open.discard(number)
        return number, self.subject.of(len(self._layout.buffers) + at)

    def send(self, buffer: int, arrays: Sequence[int] | None = None) -> None:
        """Average a full buffer, after filling in `arrays` (None: all its arrays).

        Raises ShoalError as `Group.all_reduce`, or the reason why another rank cannot end its step;
        the group has ended.
        """
        entries = self._layout.buffers[buffer].entries
        arrays = entries if arrays is None else arrays
        if self.fill is not None:
            self.fill(arrays)
        with explaining(self._group):
            number, span = self.reserve()[buffer], self._spans[buffer]
            if self._preparation is not None:
                self._preparation.prepare(buffer)
            wire: str | Codec | None = self._wire if span.dtype is DType.FLOAT32 else None
            if self._feedback is not None and span.dtype is DType.FLOAT32:
                wire = self._feedback.send(buffer, set(entries).difference(arrays))
            self._posted_ns[buffer] = time.monotonic_ns()
            self.open.discard(number)
            self._works[buffer] = self._group.all_reduce(
                span,
                Op.SUM if span.dtype is DType.FLOAT16 else Op.AVG,  # divided in Preparation
                wire=wire,
                number=number,
                subject=self.subject.of(buffer),
                async_op=True,
            )

    def wait(self, buffer: int) -> None:
        """Wait until a buffer is averaged; return at once if it was not sent in this step.

        Raises ShoalError as `Work.wait`, or the reason why another rank cannot end its step; the
        group has ended.
        """
        work = self._works[buffer]
        if work is None:
            return
        since = time.monotonic_ns()
        try:
            with explaining(self._group):
                work.wait()
        except TimedOut as error:
            raise TimedOut(f"{self._named(buffer)}: {error.args[0]}") from error
        until = time.monotonic_ns()
        self._works[buffer] = None
        self._waits[buffer] = (since, until)
        self._done_ns[buffer] = work.finished_ns or until

    def give_up_step(self) -> None:
        """Wait until no buffer of this step is in flight, in a group that has ended."""
        for work in filter(None, self._works):
            with contextlib.suppress(ShoalError):
                work.wait()
        self._works.clear()

    def done(self) -> bool:
        """Return True if every sent buffer is averaged, or has failed."""
        return all(work is None or work.done() for work in self._works)

    def times(self) -> tuple[list[int], list[int], list[tuple[int, int]]]:
        """Return when each buffer was sent and averaged, and the caller's wait for it."""
        done = list(self._done_ns)
        for buffer, work in enumerate(self._works):
            if work is not None and work.error() is None:
                done[buffer] = work.finished_ns
        return self._posted_ns, done, self._waits

    def _named(self, buffer: int) -> str:
        entries = self._layout.entries
        held = words_for([entries[index].name for index in self._layout.buffers[buffer].entries])
        return f"fusion buffer {buffer} of {len(self._layout.buffers)} ({held})"


def words_for(names: Sequence[str]) -> str:
    """Describe arrays by the names of the first and the last."""
    return " to ".join(map(repr, dict.fromkeys((names[0], names[-1])))) if names else "no array"
