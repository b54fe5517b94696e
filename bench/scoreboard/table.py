"""Tables as aligned plain text: comments begin with `#`, data rows with blanks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench.scoreboard.case import MIB
from shoal.bench.nccl_table import align
from shoal.plan.text import show_bytes

if TYPE_CHECKING:
    from bench.scoreboard.benchmark import Result, Section
    from bench.scoreboard.case import Case


def show_time(seconds: float) -> str:
    """Return a time with three digits, in us or ms."""
    if seconds < 1e-3:
        return f"{_three_digits(seconds * 1e6)} us"
    return f"{_three_digits(seconds * 1e3)} ms"


def show_cpu(seconds: float) -> str:
    """Return CPU seconds per gigabyte."""
    return f"{_three_digits(seconds)} s/GB"


def show_memory(n_bytes: float) -> str:
    """Return bytes in mebibytes."""
    return f"{n_bytes / MIB:.1f} MiB"


def show_percent(part: float) -> str:
    """Return a part in percent."""
    return f"{part:.2%}"


def show_count(number: float) -> str:
    """Return a number with one decimal, since it may be a mean."""
    return f"{number:.1f}"


def label_of(case: Case) -> str:
    """Return the name of a row: 8+4, 25 MiB, 400 Mbit/s."""
    words = _place(case)[: 2 if case.n_bytes or case.model else 1]
    if case.n_hosts:
        words.append(_rates((case.rate_mbit, *case.more_mbit), "+"))
    if case.server_mbit:
        words.append(f"servers {_rates(case.server_mbit, ',')}")
    return ", ".join(words)


def render(section: Section, rows: Sequence[Result]) -> str:
    """Return the table with its title, its notes, and the reasons for missing numbers."""
    head = [f"# {section.name}: {section.title}", *(f"# {note}" for note in section.notes)]
    if section.layout is None:
        body = align([_heading(section), *(_cells(section, row) for row in rows)])
    else:
        body = section.layout(rows)
    goals = [f"# {verdict}" for verdict in section.verdicts(rows)]
    missing = dict.fromkeys(
        f"# no {label}: {reason}" for row in rows for label, reason in row.failures.items()
    )
    return "\n".join([*head, *body, *goals, *missing]) + "\n"


def _rates(rates_mbit: Sequence[float | None], between: str) -> str:
    if None in rates_mbit:
        return "unshaped"
    return f"{between.join(f'{rate:g}' for rate in rates_mbit)} Mbit/s"


def _heading(section: Section) -> list[str]:
    return ["ranks", "size", *(one.label for one in section.benchmarks), "goals"]


def _cells(section: Section, row: Result) -> list[str]:
    medians = row.medians()
    shown = [
        (one.show or section.show)(medians[one.label]) if one.label in medians else "-"
        for one in section.benchmarks
    ]
    goals = " | ".join(map(str, row.verdicts(section)))
    return [*_place(row.case), *shown, goals]


def _place(case: Case) -> list[str]:
    ranks = f"{case.n_ranks}+{case.n_servers}" if case.n_servers else str(case.n_ranks)
    return [ranks, show_bytes(case.n_bytes) if case.n_bytes else case.model or "-"]


def _three_digits(value: float) -> str:
    n_decimals = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{n_decimals}f}"
