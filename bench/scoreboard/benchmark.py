"""Measures the benchmarks of a table in turn, round after round, in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from bench.scoreboard.job import is_same_place
from shoal.bench.job import Failure

if TYPE_CHECKING:
    from bench.scoreboard.case import Case
    from bench.scoreboard.goals import Verdict
    from bench.scoreboard.pools import WorkerPools

Measure = Callable[["WorkerPools", "Case"], float]
Announce = Callable[[str], None]

_T = TypeVar("_T")


class Taken(Generic[_T]):
    """A measurement that several columns share: the first takes it, the others read it.

    Args:
        name: its name in the reasons for missing numbers.
        take: the function that measures.
    """

    def __init__(self, name: str, take: Callable[[WorkerPools, Case], _T]) -> None:
        self._name, self._take = name, take
        self._last: _T | None = None

    @property
    def last(self) -> _T:
        """The measurement of this round; Failure if it failed."""
        if self._last is None:
            raise Failure(f"{self._name} was not measured")
        return self._last

    def first(self, value: Callable[[_T], float]) -> Measure:
        """Return the column that takes the measurement, and shows this value of it."""

        def measure(pools: WorkerPools, case: Case) -> float:
            self._last = None
            self._last = self._take(pools, case)
            return value(self._last)

        return measure

    def then(self, value: Callable[[_T], float]) -> Measure:
        """Return a column that shows another value of the measurement."""
        return lambda _pools, _case: value(self.last)


@dataclass(frozen=True)
class Benchmark:
    """A column: a library used in one way, or a bound.

    Args:
        enters: True if a row has a value for it.
        show: formats its values if their unit is not the table's.
    """

    label: str
    measure: Measure
    enters: Callable[[Case], bool] = lambda _case: True
    show: Callable[[float], str] | None = None


def columns(measure_of: Callable[[str], Measure], *libraries: str) -> tuple[Benchmark, ...]:
    """Return a column for each library, of the same measure."""
    return tuple(Benchmark(library, measure_of(library)) for library in libraries)


@dataclass(frozen=True)
class Section:
    """A table.

    Args:
        notes: lines that explain the columns to the reader of the table.
        show: formats a value, with its unit.
        in_rounds: False for values that do not drift, such as memory: measured once.
        in_quick: True for the cases of a quick run.
        is_open: True if a row needs more rounds, up to three times as many.
        note: a remark beside the numbers of a row, made before they are measured.
        layout: the lines of the table, if it is not one line per case.
        verdicts: goals of the table as a whole.
        part_of: a name for several tables.
        answer_s: the deadline of a command.
        is_large: True if its processes are too many to run beside other rows' processes.
    """

    name: str
    title: str
    notes: tuple[str, ...]
    benchmarks: tuple[Benchmark, ...]
    cases: tuple[Case, ...]
    show: Callable[[float], str]
    in_rounds: bool = True
    in_quick: Callable[[Case], bool] = lambda _case: True
    is_open: Callable[[Result], bool] = lambda _row: False
    note: Callable[[WorkerPools, Case], str] = lambda _pools, _case: ""
    layout: Callable[[Sequence[Result]], list[str]] | None = None
    verdicts: Callable[[Sequence[Result]], list[Verdict]] = lambda _rows: []
    part_of: str = ""
    answer_s: float = 40.0
    is_large: bool = False


@dataclass
class Result:
    """The values of one case by benchmark and round, or the reasons why there are none."""

    case: Case
    values: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    note: str = ""

    def medians(self) -> dict[str, float]:
        """Return the median of each benchmark over the rounds, without those that failed."""
        return {
            label: statistics.median(values)
            for label, values in self.values.items()
            if values and label not in self.failures
        }

    def ratios(self, over: str, under: str) -> list[float]:
        """Return the ratios of two benchmarks, by round."""
        if any(one in self.failures or one not in self.values for one in (over, under)):
            return []
        return [a / b for a, b in zip(self.values[over], self.values[under], strict=True)]

    def verdicts(self, section: Section) -> list[Verdict]:
        """Return the verdicts on the goals of the case."""
        medians = self.medians()
        shows = {one.label: one.show or section.show for one in section.benchmarks}
        return [goal.judge(medians, shows.get(goal.ours, section.show)) for goal in self.case.goals]


def run_section(
    section: Section,
    pools: WorkerPools,
    announce: Announce,
    on_row: Callable[[Result], None] = lambda _row: None,
) -> list[Result]:
    """Measure a table, case by case.

    Args:
        announce: called with the name of each row when it begins.
        on_row: called with each row when it is complete.
    """
    rows: list[Result] = []
    for number, case in enumerate(section.cases, 1):
        announce(f"{section.name} {number}/{len(section.cases)}")
        if section.is_large and (not rows or not is_same_place(rows[-1].case, case)):
            pools.clear()
        elif rows and _kept_by(rows[-1].case) != _kept_by(case):
            pools.forget()  # the tensors of all sizes together do not fit in memory
        rows.append(_run_case(section, case, pools))
        on_row(rows[-1])
    if section.is_large:
        pools.clear()
    pools.forget()
    return rows


def _kept_by(case: Case) -> tuple[int, str]:
    """Return the key by which ranks keep memory between rounds."""
    return case.n_bytes, case.model


def _run_case(section: Section, case: Case, pools: WorkerPools) -> Result:
    row = Result(case, note=section.note(pools, case))
    n_rounds = pools.settings.n_rounds if section.in_rounds else 1
    for number in range(3 * n_rounds):
        if number >= n_rounds and not section.is_open(row):
            break
        for benchmark in filter(lambda one: one.enters(case), section.benchmarks):
            _take_turn(benchmark, row, pools)
    return row


def _take_turn(benchmark: Benchmark, row: Result, pools: WorkerPools) -> None:
    if benchmark.label in row.failures:
        return
    try:
        value = benchmark.measure(pools, row.case)
    except Failure as failure:
        row.failures[benchmark.label] = str(failure)
    else:
        row.values.setdefault(benchmark.label, []).append(value)


def summary_of(tables: Sequence[tuple[Section, list[Result]]]) -> str:
    """Return the number of goals that are met, in words."""
    verdicts = [v for section, rows in tables for v in section.verdicts(rows)]
    verdicts += [v for section, rows in tables for row in rows for v in row.verdicts(section)]
    n_met, n_missed = (sum(v.is_met is state for v in verdicts) for state in (True, False))
    return f"goals: {n_met} met, {n_missed} missed, {len(verdicts) - n_met - n_missed} not measured"
