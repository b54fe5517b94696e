"""The planner's table: its choices beside all other algorithms.

A line is a collective and a size, a column a set of ranks; a cell is the planner's algorithm and
the ratio of its time to the best other one.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from bench.scoreboard.benchmark import Benchmark, Result
from bench.scoreboard.goals import Verdict
from bench.scoreboard.grid import grid_cases, grid_table, place_of
from bench.scoreboard.measures import time_of
from shoal.bench.collectives import COLLECTIVES
from shoal.plan.text import show_bytes
from shoal.schedule import ALGORITHMS, find

if TYPE_CHECKING:
    from bench.scoreboard.case import Case

_PLANNER: Final = "planner"
_NEAR: Final = 1.1  # times the best; a slower choice is wrong
_MOST: Final = 0.9
_N_WORST: Final = 12
_MAX_BYTES: Final = 64 << 20
_MAX_BYTES_ON_HOSTS: Final = 1 << 20


def choice_cases() -> tuple[Case, ...]:
    """Return the cases with a choice: ranks in one host, and on four hosts."""
    return tuple(
        case
        for case in grid_cases()
        if len(_names(case.collective)) > 1
        and case.n_hosts in (0, 4)
        and case.n_bytes <= (_MAX_BYTES_ON_HOSTS if case.n_hosts else _MAX_BYTES)
    )


def choice_benchmarks() -> tuple[Benchmark, ...]:
    """Return the planner's column, and one for each algorithm in the rows of its collective."""
    everything = dict.fromkeys(name for collective in COLLECTIVES for name in _names(collective))
    return (Benchmark(_PLANNER, time_of("shoal")), *map(_forced, everything))


def _forced(name: str) -> Benchmark:
    return Benchmark(
        name,
        time_of("shoal", algorithm=name),
        enters=lambda case: name in _names(case.collective),
    )


def _names(collective: str) -> list[str]:
    """Return the algorithms that ignore hosts: here all ranks share one host, or no two do."""
    known = ALGORITHMS.get(collective, {})  # a message has no algorithms to choose from
    return [name for name, algorithm in known.items() if not algorithm.by_host]


class _Outcome(NamedTuple):
    """The best of the other algorithms, and the ratios of the planner's times to its times."""

    rival: str
    ratios: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)


def _outcome(row: Result) -> _Outcome | None:
    outcomes = [
        _Outcome(name, ratios)
        for name in _names(row.case.collective)
        if not _is_same(row.case, name, row.note) and (ratios := row.ratios(_PLANNER, name))
    ]
    return max(outcomes, key=lambda outcome: outcome.ratio, default=None)


@functools.lru_cache(maxsize=1024)
def _is_same(case: Case, name: str, chosen: str) -> bool:
    """True if two names mean the same schedule, as all trees of two ranks do."""
    if not chosen or name == chosen:
        return name == chosen
    hosts = tuple(rank if case.n_hosts else 0 for rank in range(case.n_ranks))
    one, other = (
        find(case.collective, each).fitted(case.n_bytes, case.n_ranks) for each in (name, chosen)
    )
    return one.n_chunks(case.n_ranks, hosts) == other.n_chunks(case.n_ranks, hosts) and all(
        list(one.steps(rank, case.n_ranks, 0, hosts))
        == list(other.steps(rank, case.n_ranks, 0, hosts))
        for rank in range(case.n_ranks)
    )


def is_choice_open(row: Result) -> bool:
    """Return True if a choice may be wrong; at first the least of many noisy times is too low."""
    outcome = _outcome(row)
    return outcome is not None and _quartiles(outcome)[1] > _NEAR


def _quartiles(outcome: _Outcome) -> tuple[float, float]:
    if len(outcome.ratios) < 2:
        return outcome.ratio, outcome.ratio
    lower, _, upper = statistics.quantiles(outcome.ratios, n=4, method="inclusive")
    return lower, upper


def choice_lines(rows: Sequence[Result]) -> list[str]:
    """Return the lines of the table, and the worst choices by name."""
    return [*grid_table(rows, _cell), *(f"# worst: {text}" for text in _worst(rows))]


def _cell(row: Result) -> str:
    outcome = _outcome(row)
    if outcome is None:
        return "-"
    mark = "WRONG" if outcome.ratio > _NEAR else ""
    lower, upper = _quartiles(outcome)
    mark += "?" if lower <= _NEAR < upper else ""
    return f"{mark} {row.note} x{outcome.ratio:.2f}".strip()


def _worst(rows: Sequence[Result]) -> list[str]:
    found = [(outcome, row) for row in rows if (outcome := _outcome(row)) is not None]
    found.sort(key=lambda pair: -pair[0].ratio)
    return [
        f"{row.case.collective} {show_bytes(row.case.n_bytes)} {place_of(row.case)}: {row.note} "
        f"takes {outcome.ratio:.2f} times as long as {outcome.rival}"
        for outcome, row in found[:_N_WORST]
        if outcome.ratio > _NEAR
    ]


def choice_verdicts(rows: Sequence[Result]) -> list[Verdict]:
    """Return the part of the points at which the choice is about as good as the best."""
    outcomes = [outcome for row in rows if (outcome := _outcome(row)) is not None]
    n_right = sum(outcome.ratio <= _NEAR for outcome in outcomes)
    share = n_right / len(outcomes) if outcomes else None
    shown = "?" if share is None else f"{share:.1%}"
    text = f"within 10 % of the best at {shown} of {len(outcomes)} points >= {_MOST:.0%}"
    return [Verdict(text, None if share is None else share >= _MOST)]
