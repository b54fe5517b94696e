"""When what happened in a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from shoal.average.layout import Layout

# Steps are kept until a report is wanted: enough for a median; and of many buffers fewer, so that
# no more calls are kept than take a few megabytes.
_MOST_STEPS: Final = 128
_FEWEST_STEPS: Final = 8
_MOST_CALLS: Final = 1 << 14


class StepTimes(NamedTuple):
    """When what happened in a step on this rank, in nanoseconds of `time.monotonic_ns`.

    Args:
        number: of the step, from 0 on; the same on every rank.
        layout: what the buffers were.
        forward: a forward pass began; 0: nobody told.
        begin: `begin` was called.
        backward: a backward pass began; 0: nobody told.
        first: the first array was ready; 0: none was.
        full, posted, done: by buffer: it was full, its call was started, and had ended; 0: it was
            not, in a step that did not need it.
        waits: by buffer: from when until when the caller waited for it; (0, 0): it did not.
        sent: nothing more came; 0: not yet.
        wait, end: `wait` was called, and everything was averaged; 0: not yet.
        to_unix: what makes these nanoseconds of `time.time_ns`, as the two clocks stood then.
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
        """When the step began, as far as anybody told."""
        return self.forward or self.begin


class StepLog:
    """The times of the last steps. What it costs: some readings of the clock in a step.

    Attributes:
        kept: of steps that have ended, the oldest first.
        forward, begin, backward, sent: of the step under way, as `StepTimes` has them.
    """

    def __init__(self, n_buffers: int) -> None:
        n_kept = max(_FEWEST_STEPS, min(_MOST_STEPS, _MOST_CALLS // max(n_buffers, 1)))
        self.kept: deque[StepTimes] = deque(maxlen=n_kept)
        self.forward = self.begin = self.backward = self.sent = 0
        self._next_forward = 0  # it may begin before the step before has ended
        self._number = 0

    def begin_step(self) -> None:
        """A step begins, or what has begun and came to nothing begins anew."""
        self.begin = time.monotonic_ns()
        self.forward, self._next_forward = self._next_forward, 0
        self.backward = self.sent = 0

    def note_forward(self) -> None:
        """A forward pass begins, and with it the next step."""
        self._next_forward = time.monotonic_ns()

    def note_backward(self) -> None:
        """A backward pass begins; the first one of a step counts."""
        self.backward = self.backward or time.monotonic_ns()

    def note_sent(self) -> None:
        """Nothing more comes in this step."""
        self.sent = time.monotonic_ns()

    def under_way(
        self,
        layout: Layout,
        counted: tuple[int, Sequence[int]],
        sent: tuple[Sequence[int], Sequence[int], Sequence[tuple[int, int]]],
        ends: tuple[int, int] = (0, 0),
    ) -> StepTimes:
        """The times of the step under way.

        Args:
            counted: when the first array was ready, and when each buffer was full.
            sent: by buffer: posted, done, waits.
            ends: wait, end.
        """
        first, full = counted
        posted, done, waits = sent
        return StepTimes(
            number=self._number,
            layout=layout,
            forward=self.forward,
            begin=self.begin,
            backward=self.backward,
            first=first,
            full=tuple(full),
            posted=tuple(posted),
            done=tuple(done),
            waits=tuple(waits),
            sent=self.sent,
            wait=ends[0],
            end=ends[1],
            to_unix=time.time_ns() - time.monotonic_ns(),
        )

    def keep(self, times: StepTimes) -> None:
        """The step under way has ended."""
        self.kept.append(times)
        self._number += 1
