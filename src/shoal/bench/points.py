"""What was measured at one size: the numbers of nccl-tests, and what stands beside them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shoal.bench.collectives import COLLECTIVES
from shoal.bench.columns import OURS
from shoal.bench.percentiles import CallTimes, call_times

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shoal.bench.benchmark import Result
    from shoal.bench.columns import Column, Taken
    from shoal.bench.sweep import CallKind


@dataclass(frozen=True)
class Figures:
    """One library in one way at one size.

    Args:
        time_us: of a call, the mean.
        alg_gb_s: bytes of the call over its time, in GB of 10^9 bytes.
        bus_gb_s: the same times the factor of the collective.
        n_wrong: elements; None where nothing was checked.
        ratio: how many times as long as shoal a peer takes, the median over the rounds; None where
            one of them has no number, or a result was wrong.
        failure: why there are no numbers; then `taken` and `times` are None.
    """

    library: str
    in_place: bool
    time_us: float = 0.0
    alg_gb_s: float = 0.0
    bus_gb_s: float = 0.0
    n_wrong: int | None = None
    ratio: float | None = None
    times: CallTimes | None = None
    taken: Taken | None = None
    failure: str = ""


@dataclass(frozen=True)
class SizePoint:
    """One size of one kind of call."""

    kind: CallKind
    n_bytes: int
    count: int
    figures: Sequence[Figures]

    def ours(self, in_place: bool) -> Figures | None:
        """Shoal's, if it has this way and no failure."""
        return next(
            (
                one
                for one in self.figures
                if one.library == OURS and one.in_place == in_place and one.times
            ),
            None,
        )

    @property
    def n_wrong(self) -> int:
        """Over all libraries and ways."""
        return sum(one.n_wrong or 0 for one in self.figures)


def point_of(kind: CallKind, row: Result, columns: Sequence[Column]) -> SizePoint:
    """What the columns took in a row."""
    figures = []
    for column in columns:
        ours = next(one for one in columns if one.name == OURS and one.in_place == column.in_place)
        figures.append(_figures(kind, row, column, ours))
    count = kind.count(row.case.n_bytes, row.case.n_ranks)
    return SizePoint(kind, row.case.n_bytes, count, figures)


def _figures(kind: CallKind, row: Result, column: Column, ours: Column) -> Figures:
    if column.label in row.failures:
        reason = row.failures[column.label]
        return Figures(column.name, column.in_place, failure=reason)
    taken = column.taken[row.case]
    times = call_times(taken.times_s)
    alg_gb_s = row.case.n_bytes / times.avg / 1e9 if times.avg else 0.0
    ratio = None
    is_right = not (taken.n_wrong or (row.case in ours.taken and ours.taken[row.case].n_wrong))
    if column is not ours and is_right:
        ratios = row.ratios(column.label, ours.label)
        ratio = statistics.median(ratios) if ratios else None
    return Figures(
        column.name,
        column.in_place,
        time_us=times.avg * 1e6,
        alg_gb_s=alg_gb_s,
        bus_gb_s=alg_gb_s * COLLECTIVES[kind.collective].bus(row.case.n_ranks),
        n_wrong=taken.n_wrong,
        ratio=ratio,
        times=times,
        taken=taken,
    )
