"""The table of all collectives: every size on every set of ranks, Gloo beside shoal.

A line is a collective and a size, a column a set of ranks; a cell is shoal's time and the
ratio of Gloo's time to it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from bench.scoreboard.case import MIB, Case
from bench.scoreboard.goals import Verdict
from bench.scoreboard.table import show_time
from shoal.bench.collectives import COLLECTIVES
from shoal.bench.nccl_table import align
from shoal.plan.text import show_bytes
from shoal.schedule import COLLECTIVES as ROWS

if TYPE_CHECKING:
    from bench.scoreboard.benchmark import Result

_ITEM: Final = 4  # bytes of a float32
_SIZES: Final = tuple(4**power for power in range(1, 15))  # 4 B to 256 MiB
# Between hosts a call of 256 MiB takes up to five seconds, and has to be repeated. From 4 MiB on
# the wire alone decides.
_MAX_ON_HOSTS: Final = 16 * MIB


def grid_cases() -> tuple[Case, ...]:
    """Return every collective by ranks and size, a size at a time to bound the memory."""
    places = [(2, 0), (4, 0), (8, 0), (4, 4), (8, 8)]
    return tuple(
        Case(n_ranks, n_bytes, n_calls=0, n_samples=1, n_hosts=n_hosts, collective=name)
        for n_ranks, n_hosts in places
        for n_bytes in (0, *_SIZES)
        for name in COLLECTIVES
        if _exists(name, n_bytes, n_ranks, n_hosts)
    )


def _exists(name: str, n_bytes: int, n_ranks: int, n_hosts: int) -> bool:
    row = ROWS.get(name)
    carries = row is None or row.carries
    if carries != (n_bytes > 0) or (n_hosts and n_bytes > _MAX_ON_HOSTS):
        return False
    return n_bytes == 0 or not COLLECTIVES[name].cut or n_bytes >= n_ranks * _ITEM


def in_quick_grid(case: Case) -> bool:
    """Return True for every other size; between hosts up to 1 MiB."""
    return case.n_bytes in (0, *_SIZES[::2]) and not (case.n_hosts and case.n_bytes > MIB)


def is_close(row: Result) -> bool:
    """Return True if each library wins some of the middle half of the rounds."""
    ratios = row.ratios("gloo", "shoal")
    if len(ratios) < 2:
        return bool(ratios)
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive")
    return lower < 1 < upper


def grid_lines(rows: Sequence[Result]) -> list[str]:
    """Return the lines of the table of all collectives."""
    return grid_table(rows, _cell)


def grid_table(rows: Sequence[Result], cell: Callable[[Result], str]) -> list[str]:
    """Return one line per collective and size, with one column per set of ranks."""
    places = list(dict.fromkeys(place_of(row.case) for row in rows))
    cells = {(row.case.collective, row.case.n_bytes, place_of(row.case)): cell(row) for row in rows}
    kinds = sorted(
        {(row.case.collective, row.case.n_bytes) for row in rows},
        key=lambda kind: (list(COLLECTIVES).index(kind[0]), kind[1]),
    )
    body = [
        [
            name,
            show_bytes(n_bytes) if n_bytes else "-",
            *(cells.get((name, n_bytes, place), "") for place in places),
            "",
        ]
        for name, n_bytes in kinds
    ]
    return align([["collective", "size", *places, ""], *body])


def place_of(case: Case) -> str:
    """Return a column's heading."""
    return f"{case.n_hosts} hosts" if case.n_hosts else f"{case.n_ranks} ranks"


def grid_verdicts(rows: Sequence[Result]) -> list[Verdict]:
    """Return the verdicts on cells in which shoal loses, and on the geometric means."""
    measured = [row for row in rows if _ratio(row) is not None]
    lost = [row for row in measured if _is_loss(row)]
    unsure = sum(is_close(row) for row in lost)
    one_host = [row for row in measured if not row.case.n_hosts]
    hosts = [row for row in measured if row.case.n_hosts and row.case.n_bytes <= MIB]
    return [
        Verdict(
            f"losses {len(lost)} ({unsure} of them uncertain) of {len(measured)} <= 0",
            not lost if measured else None,
        ),
        _mean_verdict("in one host", one_host, 4),
        _mean_verdict("between hosts up to 1 MiB", hosts, 1.3),
    ]


def _mean_verdict(where: str, rows: Sequence[Result], goal: float) -> Verdict:
    ratios = [ratio for row in rows if (ratio := _ratio(row)) is not None]
    mean = statistics.geometric_mean(ratios) if ratios else None
    shown = "?" if mean is None else f"{mean:.2f}"
    text = f"geometric mean of gloo/shoal {where} {shown} >= {goal:g}"
    return Verdict(text, None if mean is None else mean >= goal)


def _ratio(row: Result) -> float | None:
    ratios = row.ratios("gloo", "shoal")
    return statistics.median(ratios) if ratios else None


def _is_loss(row: Result) -> bool:
    ratio = _ratio(row)
    return ratio is not None and ratio < 1


def _cell(row: Result) -> str:
    ratio = _ratio(row)
    if ratio is None:
        return "-"
    mark = "LOSS" if _is_loss(row) else ""
    mark += "?" if is_close(row) else ""
    return f"{mark} {show_time(row.medians()['shoal'])} x{ratio:.2f}".strip()
