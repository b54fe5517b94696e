"""`AveragingReport`: the breakdown of the last steps, as a table, JSON or a trace."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shoal.average.agreeing import texts_of_all
from shoal.average.lacking import named
from shoal.average.report.breakdown import StepBreakdown, break_down, compare
from shoal.average.report.chrome import trace_of
from shoal.plan.text import counted

if TYPE_CHECKING:
    from os import PathLike

    from shoal.average.report.breakdown import RankTimes
    from shoal.average.step_times import StepTimes
    from shoal.group.group import Group

_MOST_COMPARED: Final = 64  # steps, or 10 KB from each rank
_COLUMNS: Final = {
    "step": "total",
    "forward": "forward",
    "backward": "backward",
    "exposed": "exposed",
    "for slowest": "waited",
    "other": "other",
    "hidden": "hidden",
}


@dataclasses.dataclass(frozen=True)
class AveragingReport:
    """Where the time of the last steps went on this rank, and how ranks compare.

    Times are in microseconds, except in `times` (nanoseconds) and the printed table (milliseconds).

    Attributes:
        name: the name of the averager.
        rank, size: this rank in its group, and the group's size.
        steps: the ended steps of this rank, the oldest first, without the last one, whose length is
            not known.
        ranks: the mean step of each rank, or of this rank only; empty if ranks have no ended step
            in common.
        n_compared: the number of compared steps; 0 if ranks were not compared.
        missing: the arrays that are not ready in the current step.
        times: the times of the ended steps and the current step.
    """

    name: str
    rank: int
    size: int
    steps: tuple[StepBreakdown, ...]
    ranks: tuple[RankTimes, ...]
    n_compared: int
    missing: tuple[str, ...]
    times: tuple[StepTimes, ...] = dataclasses.field(repr=False)

    @property
    def slowest(self) -> RankTimes | None:
        """The rank that delayed the others most; None if ranks were not compared."""
        if not self.n_compared:
            return None
        return max(self.ranks, key=lambda one: one.held_up)

    @property
    def hidden_share(self) -> float:
        """The share of communication that this rank did not wait for; 1 without communication."""
        hidden = sum(step.hidden for step in self.steps)
        whole = hidden + sum(step.exposed for step in self.steps)
        return hidden / whole if whole else 1.0

    def __str__(self) -> str:
        return "\n".join([*_table(self), *_remarks(self)])

    def to_json(self) -> str:
        """Return all fields except the times of buffers as JSON; times are in microseconds."""
        written = {
            "name": self.name,
            "rank": self.rank,
            "size": self.size,
            "hidden_share": self.hidden_share,
            "slowest": self.slowest.rank if self.slowest else None,
            "n_compared": self.n_compared,
            "missing": self.missing,
            "steps": [step._asdict() for step in self.steps],
            "ranks": [rank._asdict() for rank in self.ranks],
        }
        return json.dumps(written, indent=1)

    def chrome_trace(self, path: str | PathLike[str]) -> None:
        """Write the steps of this rank as a trace for Perfetto, or chrome://tracing.

        Overwrites an existing file. The trace has the same clock as traces of torch's profiler. It
        is compressed if the path ends in `.gz`.

        Raises:
            OSError: the file cannot be written.
        """
        text, path = json.dumps(trace_of(self.times, self.rank)).encode(), Path(path)
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def _table(report: AveragingReport) -> Iterator[str]:
    if not report.ranks:
        yield f"{report.name}: no step has ended yet."
        return
    yield f"{report.name}: a mean step in ms"
    rows = [("rank", *_COLUMNS, "slowest in")]
    for one in report.ranks:
        times = (f"{getattr(one, field) / 1e3:.3f}" for field in _COLUMNS.values())
        rows.append((str(one.rank), *times, f"{one.n_slowest} of {report.n_compared}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _remarks(report: AveragingReport) -> Iterator[str]:
    slowest, now = report.slowest, report.times[-1] if report.times else None
    if report.steps:
        yield (
            f"Over all {counted(len(report.steps), 'step')} of rank {report.rank}, "
            f"{report.hidden_share:.1%} of its communication was hidden."
        )
    if slowest is not None:
        yield (
            f"Rank {slowest.rank} was the slowest in {slowest.n_slowest} of {report.n_compared} "
            f"steps, and held the others up by {slowest.held_up / 1e3:.3f} ms in a mean step."
        )
    if now is not None and not now.end:
        names = named(list(map(repr, report.missing)))
        not_ready = f"not ready on this rank: {names}" if names else "all arrays are ready"
        yield f"Step {now.number} has not ended; {not_ready}."


def gather(
    group: Group, name: str, steps: Sequence[StepBreakdown]
) -> dict[int, list[StepBreakdown]]:
    """Return the last steps of every rank, by rank; every rank calls it."""
    texts = texts_of_all(group, name, json.dumps(steps[-_MOST_COMPARED:]).encode())
    return {r: [StepBreakdown(*row) for row in json.loads(text)] for r, text in enumerate(texts)}


def report_on(
    group: Group,
    name: str,
    times: Sequence[StepTimes],
    now: StepTimes | None,
    missing: Sequence[str],
    *,
    alone: bool,
) -> AveragingReport:
    """Return the report of an averager of this name.

    Args:
        times: the times of the ended steps; `now`: of the current step.
        missing: the arrays that are not ready in it.
        alone: contact no other rank.
    """
    # The begin of the current step is the end of the previous one.
    every = (*times, now) if now is not None else tuple(times)
    steps = break_down(every) if times else []
    given = {group.rank: steps} if alone else gather(group, f"{name}, report", steps)
    ranks, n_compared = compare(given)
    return AveragingReport(
        name=f"{group}, {name}",
        rank=group.rank,
        size=group.size,
        steps=tuple(steps),
        ranks=tuple(ranks),
        n_compared=n_compared,
        missing=tuple(missing),
        times=every,
    )
