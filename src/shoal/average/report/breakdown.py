"""Breaks down the time of a step, from its recorded times, and compares ranks. Pure.

A step lasts from the begin of its forward pass to the begin of the next one; if no front end
records forward passes, from one `begin` to the next. It consists of forward, backward, exposed
communication, and other: the optimizer, data, losses, and passes without averaging.

Clocks of hosts are not compared. Each rank measures from its last average of the previous step,
which all ranks have at about the same time. The error is at most the time between the first and the
last rank to get that average: the end of one all-reduce.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from shoal.average.step_times import StepTimes

Interval = tuple[int, int]

_PARTS: Final = ("total", "forward", "backward", "exposed", "other", "hidden")


class StepBreakdown(NamedTuple):
    """One step of one rank, in microseconds.

    Args:
        number: the number of the step, from 0.
        total: the whole step; the sum of the next four.
        forward: the forward pass, less the waits in it; if none was recorded, the time until the
            first array was ready.
        backward: the backward pass until the last gradient was ready; if none was recorded, the
            time from the first ready array to the last.
        exposed: the rank waited for averages.
        other: the rest.
        hidden: communication of this step while the rank did not wait for it.
        own: from the last average of the previous step to the send of this step's last buffer; -1:
            unknown.
    """

    number: int
    total: float
    forward: float
    backward: float
    exposed: float
    other: float
    hidden: float
    own: float


class RankTimes(NamedTuple):
    """One rank's mean step, in microseconds. For the parts see `StepBreakdown`.

    Args:
        waited: the part of `exposed` spent on the slowest rank of each step, which a faster network
            would not save.
        n_slowest: the number of compared steps in which its last buffer was sent last.
        held_up: the delay of its last buffer behind the next slowest rank's in those steps, as a
            mean over all compared steps.
    """

    rank: int
    total: float
    forward: float
    backward: float
    exposed: float
    other: float
    hidden: float
    waited: float
    n_slowest: int
    held_up: float


def break_down(steps: Sequence[StepTimes]) -> list[StepBreakdown]:
    """Break down consecutive steps.

    Leaves out the last step if there are others: its end is not known yet.
    """
    whole = list(steps[:-1]) or list(steps)
    found: list[StepBreakdown] = []
    for index, times in enumerate(whole):
        before = steps[index - 1] if index else None
        after = steps[index + 1].start if index + 1 < len(steps) else times.end
        found.append(_of_step(before, times, after))
    return found


def compare(given: Mapping[int, Sequence[StepBreakdown]]) -> tuple[list[RankTimes], int]:
    """Return the mean step of each rank over the steps that all ranks of `given` have, and a count.

    If the slowest rank of some of these steps is known, only these steps count. The count is the
    number of compared steps; 0 if ranks cannot be compared.
    """
    by_number = {rank: {step.number: step for step in steps} for rank, steps in given.items()}
    numbers = sorted(set.intersection(*map(set, by_number.values())))
    if not numbers:
        return [], 0
    rows = [{rank: named[number] for rank, named in by_number.items()} for number in numbers]
    timed = [row for row in rows if len(row) > 1 and all(step.own >= 0 for step in row.values())]
    return [_of_rank(rank, rows, timed) for rank in given], len(timed)


def waits_of(times: StepTimes) -> list[Interval]:
    """Return the intervals in which a rank waited for the averages of a step."""
    return _merged([*times.waits, (times.wait, times.end)])


def forward_of(times: StepTimes) -> Interval:
    """Return the interval of the forward pass."""
    if times.forward:
        return times.forward, times.begin
    return times.begin, times.backward or times.first or times.begin


def backward_of(times: StepTimes) -> Interval:
    """Return the interval of the backward pass."""
    return times.backward or times.first or times.sent, times.sent


def _of_step(before: StepTimes | None, times: StepTimes, after: int) -> StepBreakdown:
    waits = waits_of(times)
    flights = _merged(zip(times.posted, times.done, strict=True))
    total = after - times.start
    forward, backward = (
        _length(one) - _common(one, waits)
        for one in (_merged([forward_of(times)]), _merged([backward_of(times)]))
    )
    exposed = _common([(times.start, after)], waits)
    last_done = max(before.done, default=0) if before is not None else 0
    last_posted = max(times.posted, default=0)
    return StepBreakdown(
        number=times.number,
        total=total / 1e3,
        forward=forward / 1e3,
        backward=backward / 1e3,
        exposed=exposed / 1e3,
        other=(total - forward - backward - exposed) / 1e3,
        hidden=(_length(flights) - _common(flights, waits)) / 1e3,
        own=(last_posted - last_done) / 1e3 if last_done and last_posted else -1.0,
    )


def _of_rank(
    rank: int,
    rows: Sequence[Mapping[int, StepBreakdown]],
    timed: Sequence[Mapping[int, StepBreakdown]],
) -> RankTimes:
    waited: list[float] = []
    held_up: list[float] = []
    for row in timed:
        second, first = sorted(step.own for step in row.values())[-2:]
        waited.append(min(first - row[rank].own, row[rank].exposed))
        if max(row, key=lambda other: row[other].own) == rank:
            held_up.append(first - second)
    mine = [row[rank] for row in timed or rows]
    means = {part: sum(getattr(step, part) for step in mine) / len(mine) for part in _PARTS}
    return RankTimes(
        rank=rank,
        **means,
        waited=sum(waited) / max(len(waited), 1),
        n_slowest=len(held_up),
        held_up=sum(held_up) / max(len(timed), 1),
    )


# Intervals of time. `_merged` returns ordered intervals that do not overlap.


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    apart: list[Interval] = []
    for begin, end in sorted(one for one in intervals if one[1] > one[0]):
        if apart and begin <= apart[-1][1]:
            apart[-1] = (apart[-1][0], max(end, apart[-1][1]))
        else:
            apart.append((begin, end))
    return apart


def _length(apart: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in apart)


def _common(some: Sequence[Interval], others: Sequence[Interval]) -> int:
    """Return the length of the intersection; the intervals of each do not overlap."""
    return _length(some) + _length(others) - _length(_merged([*some, *others]))
