"""`shoal bench`: the run itself, from the flags to the table and the file."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.bench.benchmark import Section, run_section
from shoal.bench.beside import beside
from shoal.bench.case import Case
from shoal.bench.collectives import COLLECTIVES
from shoal.bench.columns import columns_of
from shoal.bench.limits import Limit
from shoal.bench.machine import describe_run, render_run
from shoal.bench.nccl_table import foot, head, row
from shoal.bench.points import SizePoint, point_of
from shoal.bench.progress import Progress
from shoal.bench.record import check_writable, now, record_of, write_record
from shoal.bench.table import show_size, show_time
from shoal.bench.worker_pools import BenchOptions, WorkerPools
from shoal.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from shoal.bench.benchmark import Result
    from shoal.bench.job import JobSpec
    from shoal.bench.sweep import CallKind, Sweep
    from shoal.bench.worker_pools import RankPool


def run_sweep(
    sweep: Sweep,
    argv: Sequence[str],
    out: Path | None,
    joined: Callable[[JobSpec], RankPool] | None = None,
    is_telling: bool = True,
) -> int:
    """Measure, print a row for each size as soon as it is there, and write the file.

    Args:
        argv: the arguments, for whoever reads the results.
        joined: makes the pool of ranks that a launcher has started.
        is_telling: False on all ranks but one of such a job.

    Returns: the exit code: 1 if a result was wrong or shoal has no number somewhere.

    Raises:
        UsageError: there are no such sizes, roots or pairs; the file cannot be written.
        Failure: shoal cannot be started at all.
    """
    _check(sweep)
    if out and is_telling:
        check_writable(out)
    options = BenchOptions(sweep.n_rounds, sweep.mpi, answer_s=sweep.answer_s)
    with WorkerPools(options, joined) as pools, Progress(sys.stderr) as progress:
        run = _Run(sweep, pools, progress if is_telling else None)
        code = run.measure(argv)
    if out and is_telling:
        write_record(out, run.record())
    return code


def _check(sweep: Sweep) -> None:
    sweep.sizes.sizes()
    n_ranks = sweep.place.n_ranks
    for root in sweep.roots:
        if root >= n_ranks:
            raise UsageError(f"-r {root}: the ranks are 0 to {n_ranks - 1}")
    if n_ranks % 2 and all(COLLECTIVES[name].in_pairs for name in sweep.collectives):
        raise UsageError(f"send_recv pairs the ranks up, and {n_ranks} ranks are no pairs")


class _Run:
    """A run in the making: prints as it goes, unless there is no progress to show."""

    def __init__(self, sweep: Sweep, pools: WorkerPools, progress: Progress | None) -> None:
        self._sweep, self._pools, self._progress = sweep, pools, progress
        self._points: list[SizePoint] = []
        self._limit = Limit(sweep.place) if sweep.place.n_hosts > 1 else None
        self._start_time = now()
        self._run: Mapping[str, str] = {}
        self._ranks: Sequence[Mapping[str, Any]] = ()

    def measure(self, argv: Sequence[str]) -> int:
        """All of it; the exit code."""
        sweep = self._sweep
        self._run = describe_run(argv)
        self._say("starting ranks")
        asked = Case(sweep.place.n_ranks, 0, n_hosts=sweep.place.n_hosts)
        asked = next((c for kind in sweep.kinds() for c in self._cases(kind)), asked)
        self._ranks = self._pools.ask(sweep.library, asked, "who")
        self._measure_limit()
        self._print(render_run(self._run))
        for kind in sweep.kinds():
            self._measure_kind(kind)
        self._measure_limit()
        if self._limit:
            self._print(_limit_text(self._limit))
        is_bad = any(
            point.n_wrong or not (point.ours(False) or point.ours(True)) for point in self._points
        )
        return int(is_bad or not self._points)

    def record(self) -> Mapping[str, Any]:
        """What is written to the file."""
        return record_of(
            self._sweep, self._run, self._ranks, self._points, self._limit, self._start_time
        )

    def _cases(self, kind: CallKind) -> list[Case]:
        return kind.cases(self._sweep.sizes.sizes(), self._sweep.place)

    def _measure_kind(self, kind: CallKind) -> None:
        columns, points = columns_of(self._sweep, kind), list[SizePoint]()
        cases = self._cases(kind)
        section = Section(
            kind.collective,
            "",
            (),
            tuple(column.benchmark() for column in columns),
            tuple(cases),
            show_time,
        )

        def tell(result: Result) -> None:
            points.append(point_of(kind, result, columns))
            self._print(row(points[-1]))

        self._print(head(self._sweep, kind, self._ranks))
        if not cases:
            self._print(f"# {kind.collective}: {_why_nothing(kind, self._sweep.place.n_ranks)}\n")
        run_section(section, self._pools, self._say, tell)
        ours = [way for point in points for flag in (False, True) if (way := point.ours(flag))]
        mean = statistics.fmean(way.bus_gb_s for way in ours) if ours else 0.0
        self._print(beside(points, self._sweep.n_rounds, self._limit))
        self._print(foot(kind, sum(bool(point.n_wrong) for point in points), mean))
        self._points += points

    def _measure_limit(self) -> None:
        if self._limit:
            self._say("raw streams")
            self._limit.measure(self._pools)

    def _say(self, what: str) -> None:
        if self._progress:
            self._progress.say(what)

    def _print(self, text: str) -> None:
        if self._progress:
            self._progress.clear()
            print(text, end="", flush=True)


def _why_nothing(kind: CallKind, n_ranks: int) -> str:
    if COLLECTIVES[kind.collective].in_pairs and n_ranks % 2:
        return f"not measured, {n_ranks} ranks are no pairs"
    return f"an element of each rank takes {show_size(kind.element.n_bytes * n_ranks)}"


def _limit_text(limit: Limit) -> str:
    rate = limit.place.rate_mbit
    shaped = "not shaped" if rate is None else f"shaped to {rate:g} Mbit/s"
    raw = " and ".join(f"{one * 8 / 1e6:.0f}" for one in limit.raw_bytes_per_s)
    return (
        f"# line: NICs {shaped}; raw TCP streams, all hosts sending in a ring, reached "
        f"{raw} Mbit/s, before and after\n"
    )
