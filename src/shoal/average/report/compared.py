"""How the ranks of a group compare: their shares of steps, and who was waited for.

Clocks of hosts are not compared: only how long each rank took since it had the last average of the
step before, which all ranks have at about the same time. How far apart that is, at most the end of
one all-reduce, is how wrong it may be.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.average.report.breakdown import StepBreakdown

if TYPE_CHECKING:
    from shoal.group.group import Group

# The last steps that ranks tell each other of: 4 KiB from each.
_MOST_TOLD: Final = 64
_N_FIELDS: Final = len(StepBreakdown._fields)


class RankTimes(NamedTuple):
    """One rank's mean step, in microseconds, as `StepBreakdown` has it.

    Args:
        waited: how much of `exposed` it waited for the slowest rank of each step: no network could
            have been fast enough.
        n_slowest: in so many of the steps that were compared, its last buffer left last.
        held_up: how much sooner its last buffer would have had to leave in those steps to be no
            later than another rank's, on average of all steps.
    """

    rank: int
    total: float
    forward: float
    backward: float
    exposed: float
    other: float
    hidden: float
    own: float
    waited: float
    n_slowest: int
    held_up: float


def gather(group: Group, name: str, steps: Sequence[StepBreakdown]) -> list[list[StepBreakdown]]:
    """What every rank knows of its last steps, by rank; every rank calls it.

    Raises:
        ShoalError: as `Group.all_gather`.
    """
    if group.size == 1:
        return [list(steps)]
    rows = [value for step in steps[-_MOST_TOLD:] for value in map(float, step)]
    rows += [-1.0] * (_MOST_TOLD * _N_FIELDS - len(rows))
    told = array("d", bytes(8 * len(rows) * group.size))
    group.all_gather(told, array("d", rows), name=name)
    return [_read(told[rank * len(rows) : (rank + 1) * len(rows)]) for rank in range(group.size)]


def _read(values: Sequence[float]) -> list[StepBreakdown]:
    rows = (values[at : at + _N_FIELDS] for at in range(0, len(values), _N_FIELDS))
    return [StepBreakdown(int(row[0]), *row[1:]) for row in rows if row[0] >= 0]


def compare(told: Sequence[Sequence[StepBreakdown]]) -> tuple[list[RankTimes], int]:
    """The ranks' mean steps, and of how many steps: of those that all ranks know.

    They are those of which one can tell who was slowest, where there are any; else the number is 0.

    Args:
        told: by rank.
    """
    by_number = [{step.number: step for step in steps} for steps in told]
    numbers = sorted(set.intersection(*map(set, by_number)))
    if not numbers:
        return [], 0
    rows = [[named[number] for named in by_number] for number in numbers]
    timed = [row for row in rows if len(row) > 1 and all(step.own >= 0 for step in row)]
    return [_of_rank(rank, rows, timed) for rank in range(len(told))], len(timed)


def _of_rank(
    rank: int, rows: Sequence[Sequence[StepBreakdown]], timed: Sequence[Sequence[StepBreakdown]]
) -> RankTimes:
    waited: list[float] = []
    held_up: list[float] = []
    for row in timed:
        second, first = sorted(step.own for step in row)[-2:]
        waited.append(min(first - row[rank].own, row[rank].exposed))
        if max(range(len(row)), key=lambda other: row[other].own) == rank:
            held_up.append(first - second)
    mine = [row[rank] for row in timed or rows]

    def mean(field: str) -> float:
        return _mean([getattr(step, field) for step in mine])

    return RankTimes(
        rank=rank,
        total=mean("total"),
        forward=mean("forward"),
        backward=mean("backward"),
        exposed=mean("exposed"),
        other=mean("other"),
        hidden=mean("hidden"),
        own=_mean([row[rank].own for row in timed]),
        waited=_mean(waited),
        n_slowest=len(held_up),
        held_up=sum(held_up) / max(len(timed), 1),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
