"""Times of the events in each step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from shoal.average.layout import Layout
    from shoal.engine import Countdown

# Enough steps for a median; fewer if they have many buffers, so that the recorded calls take no
# more than a few megabytes.
_MOST_STEPS: Final = 128
_FEWEST_STEPS: Final = 8
_MOST_CALLS: Final = 1 << 14


class StepTimes(NamedTuple):
    """The times of one step on this rank, in nanoseconds of `time.monotonic_ns`; 0 for never.

    Args:
        number: the number of the step, from 0; the same on every rank.
        layout: the layout of the buffers.
        forward: a forward pass began, if it was recorded.
        begin: `begin` was called.
        backward: a backward pass began, if it was recorded.
        first: the first array was ready.
        full, posted, done: by buffer: it was full, its call was started, and its call had ended.
        waits: by buffer: the begin and the end of the caller's wait for it.
        sent: no more arrays could be ready.
        wait, end: `wait` was called, and everything was averaged.
        to_unix: added to these times, gives times of `time.time_ns`.
    """

    number: int
    layout: Layout
    forward: int
    begin: int
    backward: int
    first: int
    full: tuple[int, ...]
    posted: tuple[int, ...]
    done: tuple[int, ...]
    waits: tuple[tuple[int, int], ...]
    sent: int
    wait: int
    end: int
    to_unix: int

    @property
    def start(self) -> int:
        """The begin of the forward pass if it was recorded, else of the step."""
        return self.forward or self.begin


class StepLog:
    """Keeps the times of the last steps.

    Attributes:
        kept: the ended steps, the oldest first.
        n_steps: the number of ended steps; the same on every rank.
    """

    def __init__(self) -> None:
        self.kept: deque[StepTimes] = deque()
        self._forward = self._begin = self._backward = self._sent = 0
        self._next_forward = 0  # it may begin before the previous step has ended
        self.n_steps = 0

    def lay_out(self, n_buffers: int) -> None:
        """Set the number of steps to keep, by their number of buffers."""
        n_kept = max(_FEWEST_STEPS, min(_MOST_STEPS, _MOST_CALLS // max(n_buffers, 1)))
        self.kept = deque(self.kept, maxlen=n_kept)

    def begin_step(self) -> None:
        """Begin a step, even if the previous step has begun and nothing was ready in it."""
        self._begin = time.monotonic_ns()
        self._forward, self._next_forward = self._next_forward, 0
        self._backward = self._sent = 0

    def note_forward(self) -> None:
        """Record the begin of a forward pass, and with it of the next step."""
        self._next_forward = time.monotonic_ns()

    def note_backward(self) -> None:
        """Record the begin of a backward pass; the first one of a step counts."""
        self._backward = self._backward or time.monotonic_ns()

    def note_sent(self) -> None:
        """Record that no more arrays can be ready in this step."""
        self._sent = time.monotonic_ns()

    def under_way(
        self,
        layout: Layout,
        countdown: Countdown,
        calls: tuple[Sequence[int], Sequence[int], Sequence[tuple[int, int]]],
        wait: int = 0,
        end: int = 0,
    ) -> StepTimes:
        """Return the times of the current step, from its countdown and the times of its calls."""
        posted, done, waits = calls
        return StepTimes(
            number=self.n_steps,
            layout=layout,
            forward=self._forward,
            begin=self._begin,
            backward=self._backward,
            first=countdown.first_ns,
            full=tuple(countdown.full_ns),
            posted=tuple(posted),
            done=tuple(done),
            waits=tuple(waits),
            sent=self._sent,
            wait=wait,
            end=end,
            to_unix=time.time_ns() - time.monotonic_ns(),
        )

    def keep(self, times: StepTimes) -> None:
        """Keep the times of the current step, after its end."""
        self.kept.append(times)
        self.n_steps += 1
