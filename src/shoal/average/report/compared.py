"""How the ranks of a group compare: their shares of steps, and their waits for the slowest.

Clocks of hosts are not compared: only how long each rank took since it had the last average of the
step before, which all ranks have at about the same time. How far apart that is, at most the end of
one all-reduce, is how wrong it may be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.average.agreeing import texts_of_all
from shoal.average.report.breakdown import StepBreakdown

if TYPE_CHECKING:
    from shoal.group.group import Group

_MOST_STEPS: Final = 64  # 10 KB from each rank
_PARTS: Final = ("total", "forward", "backward", "exposed", "other", "hidden")


class RankTimes(NamedTuple):
    """One rank's mean step, in microseconds, as `StepBreakdown` has it.

    Args:
        waited: how much of `exposed` it waited for the slowest rank of each step: no network could
            have been fast enough.
        n_slowest: in how many of the compared steps its last buffer left last.
        held_up: how much sooner its last buffer would have had to leave in those steps to be no
            later than another rank's, as a mean over all compared steps.
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


def gather(
    group: Group, name: str, steps: Sequence[StepBreakdown]
) -> dict[int, list[StepBreakdown]]:
    """Return the last steps of every rank, by rank, or ShoalError; every rank calls it."""
    texts = texts_of_all(group, name, json.dumps(steps[-_MOST_STEPS:]).encode())
    return {r: [StepBreakdown(*row) for row in json.loads(text)] for r, text in enumerate(texts)}


def compare(given: Mapping[int, Sequence[StepBreakdown]]) -> tuple[list[RankTimes], int]:
    """Return the ranks' mean steps, and the number of steps, which all ranks of `given` know.

    If the slowest rank of some is known, only these count; else the number is 0.
    """
    by_number = {rank: {step.number: step for step in steps} for rank, steps in given.items()}
    numbers = sorted(set.intersection(*map(set, by_number.values())))
    if not numbers:
        return [], 0
    rows = [{rank: named[number] for rank, named in by_number.items()} for number in numbers]
    timed = [row for row in rows if len(row) > 1 and all(step.own >= 0 for step in row.values())]
    return [_of_rank(rank, rows, timed) for rank in given], len(timed)


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
