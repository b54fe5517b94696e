"""`shoal bench`: the run itself, from the flags to the table and the file."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.bench.collectives import COLLECTIVES
from shoal.bench.job import Failure, JobSpec
from shoal.bench.launch import Placement
from shoal.bench.machine import describe_run, render_run
from shoal.bench.measured import SizePoint, columns_of
from shoal.bench.nccl_table import beside, foot, head, row
from shoal.bench.record import write_record
from shoal.bench.worker_pool import StartedRanks
from shoal.errors import UsageError
from shoal.lab import Lab
from shoal.plan.text import show_bytes

if TYPE_CHECKING:
    from shoal.bench.measured import Ask, Column
    from shoal.bench.sweep import CallKind, Sweep


def run_sweep(
    sweep: Sweep,
    argv: Sequence[str],
    out: Path | None,
    joined: Ask | None = None,
    is_first: bool = True,
) -> int:
    """Measure, print a row for each size at once, and write the file.

    Returns the exit code: 1 if a result was wrong or shoal has no number for some size. Raises
    UsageError for invalid sizes, roots or pairs; Failure if shoal cannot be started.

    Args:
        argv: the arguments, for the head of the results.
        joined: sends commands to ranks started by a launcher; None: start ranks here.
        is_first: this rank of such a job prints and writes.
    """
    _check(sweep)
    with contextlib.ExitStack() as stack:
        lab = None
        if sweep.place.n_hosts:
            lab = stack.enter_context(Lab(sweep.place.n_hosts, sweep.place.rate_mbit))
        if joined is None:
            place = JobSpec(sweep.library, sweep.place.n_ranks, sweep.place.n_hosts)
            started = StartedRanks(place, Placement(lab), sweep.answer_s)
            joined = stack.enter_context(started).ask
        run = _Run(sweep, joined, is_first)
        code = run.measure(argv)
    if out and is_first:
        write_record(out, run.facts, run.points)
    return code


def _check(sweep: Sweep) -> None:
    sweep.sizes.sizes()
    n_ranks = sweep.place.n_ranks
    for root in sweep.roots:
        if root >= n_ranks:
            raise UsageError(f"-r {root}: the ranks are 0 to {n_ranks - 1}")
    if n_ranks % 2 and all(COLLECTIVES[name].in_pairs for name in sweep.collectives):
        raise UsageError(f"send_recv needs pairs of ranks, and {n_ranks} ranks cannot be paired")


class _Run:
    """A run in progress: prints each row as soon as it is measured, if this rank prints."""

    def __init__(self, sweep: Sweep, ask: Ask, prints: bool) -> None:
        self._sweep, self._ask, self._prints = sweep, ask, prints
        self.points: list[SizePoint] = []
        self.facts: Mapping[str, str] = {}
        self._ranks: Sequence[Mapping[str, Any]] = ()

    def measure(self, argv: Sequence[str]) -> int:
        """Measure everything; return the exit code."""
        place = self._sweep.place
        self.facts = place.facts | describe_run(["shoal", "bench", *argv])
        self._ranks = self._ask(self._sweep.library, "who")
        self._print(render_run(self.facts))
        for kind in self._sweep.kinds():
            self._measure_kind(kind)
        is_bad = any(
            point.n_wrong or not (point.ours(False) or point.ours(True)) for point in self.points
        )
        return int(is_bad or not self.points)

    def _measure_kind(self, kind: CallKind) -> None:
        n_ranks = self._sweep.place.n_ranks
        sizes = kind.fitting(self._sweep.sizes.sizes(), n_ranks)
        columns, points = columns_of(self._sweep, kind), list[SizePoint]()
        self._print(head(self._sweep, kind, self._ranks))
        if not sizes:
            self._print(f"# {kind.collective}: {_why_nothing(kind, n_ranks)}\n")
        for n_bytes in sizes:
            points.append(self._measure_size(kind, n_bytes, columns))
            self._print(row(points[-1]))
        ours = [way for point in points for flag in (False, True) if (way := point.ours(flag))]
        mean = statistics.fmean(way.bus_gb_s for way in ours) if ours else 0.0
        self._print(beside(points, self._sweep.n_rounds))
        self._print(foot(kind, sum(bool(point.n_wrong) for point in points), mean))
        self.points += points

    def _measure_size(self, kind: CallKind, n_bytes: int, columns: Sequence[Column]) -> SizePoint:
        """Measure all columns in turn, round after round: a machine's speed drifts."""
        figures = [column.at(n_bytes) for column in columns]
        for _ in range(self._sweep.n_rounds):
            for column, one in zip(columns, figures, strict=True):
                column.measure(self._ask, one)
        for library in dict.fromkeys(one.library for one in columns if not one.failure):
            with contextlib.suppress(Failure):  # all sizes together do not fit in memory
                self._ask(library, "forget")
        place = self._sweep.place
        least_s = place.least_time_s(kind.collective, n_bytes)
        return SizePoint(kind, n_bytes, kind.count(n_bytes, place.n_ranks), least_s, figures)

    def _print(self, text: str) -> None:
        if self._prints:
            print(text, end="", flush=True)


def _why_nothing(kind: CallKind, n_ranks: int) -> str:
    if COLLECTIVES[kind.collective].in_pairs and n_ranks % 2:
        return f"not measured, {n_ranks} ranks cannot be paired"
    return f"an element of each rank takes {show_bytes(kind.element.n_bytes * n_ranks)}"
