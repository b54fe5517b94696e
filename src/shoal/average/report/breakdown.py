"""Where the time of a step went, computed from its times. Pure.

A step lasts from the beginning of its forward pass to the beginning of the next one's; where no
front end notes forward passes, from one `begin` to the next. All of it is forward, backward,
exposed communication, or other: the optimizer, data, losses, and passes without averaging.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from shoal.average.step_times import StepTimes

Interval = tuple[int, int]


class StepBreakdown(NamedTuple):
    """One step of one rank, in microseconds.

    Args:
        number: of the step, counted from 0.
        total: of the step; the sum of the next four.
        forward: the forward pass, less the waits in it; where none was noted, the time until the
            first array was ready.
        backward: the backward pass until the last gradient came; where none was noted, the time
            from the first array that was ready to the last.
        exposed: the rank waited for averages.
        other: the rest.
        hidden: communication of this step while the rank did not wait for it.
        own: from when the last buffer of the step before was averaged to when the last of this one
            left; -1: not known. All ranks see a buffer averaged at about the same time, so this
            compares ranks without comparing their clocks.
    """

    number: int
    total: float
    forward: float
    backward: float
    exposed: float
    other: float
    hidden: float
    own: float

    @property
    def communication(self) -> float:
        """How long any buffer was on its way."""
        return self.exposed + self.hidden


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, in intervals that are apart and in order."""
    apart: list[Interval] = []
    for begin, end in sorted(one for one in intervals if one[1] > one[0]):
        if apart and begin <= apart[-1][1]:
            apart[-1] = (apart[-1][0], max(end, apart[-1][1]))
        else:
            apart.append((begin, end))
    return apart


def length(intervals: Iterable[Interval]) -> int:
    """How long intervals that are apart are together."""
    return sum(end - begin for begin, end in intervals)


def common(some: Sequence[Interval], others: Sequence[Interval]) -> int:
    """How long both last at once; the intervals of each are apart."""
    return length(some) + length(others) - length(merged([*some, *others]))


def waits_of(times: StepTimes) -> list[Interval]:
    """When a rank waited for the averages of a step."""
    return merged([*times.waits, (times.wait, times.end)])


def forward_of(times: StepTimes) -> Interval:
    """When the forward pass was."""
    if times.forward:
        return times.forward, times.begin
    return times.begin, times.backward or times.first or times.begin


def backward_of(times: StepTimes) -> Interval:
    """When the backward pass was."""
    return times.backward or times.first or times.sent, times.sent


def break_down(steps: Sequence[StepTimes]) -> list[StepBreakdown]:
    """Break down steps that follow one another.

    The last one is left out where there are others: its end is not known yet.
    """
    whole = list(steps[:-1]) or list(steps)
    found: list[StepBreakdown] = []
    for index, times in enumerate(whole):
        before = steps[index - 1] if index else None
        after = steps[index + 1].start if index + 1 < len(steps) else times.end
        found.append(_of_step(before, times, after))
    return found


def _of_step(before: StepTimes | None, times: StepTimes, after: int) -> StepBreakdown:
    waits = waits_of(times)
    flights = merged(zip(times.posted, times.done, strict=True))
    total = after - times.start
    forward, backward = (
        length(one) - common(one, waits)
        for one in (merged([forward_of(times)]), merged([backward_of(times)]))
    )
    exposed = common([(times.start, after)], waits)
    return StepBreakdown(
        number=times.number,
        total=total / 1e3,
        forward=forward / 1e3,
        backward=backward / 1e3,
        exposed=exposed / 1e3,
        other=(total - forward - backward - exposed) / 1e3,
        hidden=(length(flights) - common(flights, waits)) / 1e3,
        own=_own(before, times),
    )


def _own(before: StepTimes | None, times: StepTimes) -> float:
    done = max(before.done, default=0) if before is not None else 0
    posted = max(times.posted, default=0)
    return (posted - done) / 1e3 if done and posted else -1.0
