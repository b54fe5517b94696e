"""A report as tables of words, and those as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from shoal.average.report.breakdown import StepBreakdown
    from shoal.average.report.report import AveragingReport

_MOST_NAMED: Final = 5
_UNKNOWN: Final = "not known"

_PARTS: Final[Sequence[tuple[str, Callable[[StepBreakdown], float]]]] = (
    ("forward", lambda step: step.forward),
    ("backward", lambda step: step.backward),
    ("exposed communication", lambda step: step.exposed),
    ("other", lambda step: step.other),
    ("step", lambda step: step.total),
    ("hidden communication", lambda step: step.hidden),
)


class Table(NamedTuple):
    """Words in rows and columns; the first column is a name, the others are numbers.

    Args:
        remarks: sentences to stand below.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()


def tables_of(report: AveragingReport) -> list[Table]:
    """What there is to show."""
    tables = [_steps(report)]
    if len(report.ranks) > 1:
        tables.append(_ranks(report))
    if report.steps:
        tables.append(_buffers(report))
    return tables


def text_of(tables: Sequence[Table]) -> str:
    """The tables as plain text."""
    return "\n\n".join("\n".join(_lines(table)) for table in tables)


def _steps(report: AveragingReport) -> Table:
    steps = report.steps
    rows: list[tuple[str, ...]] = []
    whole = sum(step.total for step in steps)
    for name, get in _PARTS if steps else ():
        values = [get(step) for step in steps]
        longest = max(steps, key=get)
        rows.append(
            (
                name,
                _ms(statistics.fmean(values)),
                _ms(statistics.median(values)),
                f"{_ms(get(longest))} (step {longest.number})",
                _share(sum(values) / whole if whole else 0.0),
            )
        )
    n_steps = f"{len(steps)} steps" if len(steps) != 1 else "1 step"
    return Table(
        f"{report.name}: where the time of {n_steps} went",
        ("ms", "mean", "median", "longest", "share"),
        tuple(rows),
        tuple(_remarks(report)),
    )


def _remarks(report: AveragingReport) -> Iterator[str]:
    if not report.steps:
        yield "No step has ended yet."
    elif math.isnan(report.hidden_share):
        yield "How much of the communication was hidden is not known."
    else:
        yield f"{_share(report.hidden_share)} of the communication was hidden."
    if report.device:
        yield (
            f"Gradients are on {report.device}: passes and waits are the host's, which does not "
            "wait for what it gives the device to compute."
        )
    now = report.times[-1] if report.times and not report.times[-1].end else None
    if now is None:
        return
    open_ones = [n for n, sent in enumerate(now.posted) if sent and not now.done[n]]
    yield f"Step {now.number} has not ended; {_named(report.missing)}."
    if open_ones:
        yield f"On their way: fusion buffer{'s' * (len(open_ones) > 1)} {_some(open_ones)}."


def _named(missing: Sequence[str]) -> str:
    return (
        f"not ready on this rank: {_some([repr(n) for n in missing])}" if missing else "all ready"
    )


def _some(values: Sequence[object]) -> str:
    more = f" and {len(values) - _MOST_NAMED} more" if len(values) > _MOST_NAMED else ""
    return ", ".join(map(str, values[:_MOST_NAMED])) + more


def _ranks(report: AveragingReport) -> Table:
    rows = [
        (
            str(one.rank),
            *map(_ms, (one.total, one.forward, one.backward, one.exposed, one.waited, one.other)),
            _ms(one.hidden),
            str(one.n_slowest),
        )
        for one in report.ranks
    ]
    heads = ("rank", "step", "forward", "backward", "exposed", "for slowest", "other", "hidden")
    title = "Ranks: a mean step in ms; of the exposed part, what was waited for the slowest rank"
    return Table(title, (*heads, "slowest"), tuple(rows), tuple(_slowest(report)))


def _slowest(report: AveragingReport) -> Iterator[str]:
    slowest = report.slowest
    if slowest is not None:
        yield (
            f"Rank {slowest.rank} was the slowest in {slowest.n_slowest} of {report.n_compared} "
            f"steps, and held the others up by {_ms(slowest.held_up)} ms in a mean step."
        )


def _buffers(report: AveragingReport) -> Table:
    rows = [
        (
            str(one.number),
            f"{one.n_bytes / 1024:.1f}",
            _full(one.full, report.device),
            *map(_ms, (one.posted, one.done, one.done - one.posted, one.waited)),
            " .. ".join(dict.fromkeys(one.arrays)),
        )
        for one in report.buffers
    ]
    heads = ("KiB", "full", "posted", "done", "took", "waited", "holds")
    return Table(
        "Fusion buffers: ms after the backward pass began, in a mean step",
        ("buffer", *heads),
        tuple(rows),
    )


def _full(us: float, device: str) -> str:
    return "never" if math.isnan(us) and not device else _ms(us)


def _ms(us: float) -> str:
    return _UNKNOWN if math.isnan(us) else f"{us / 1e3:.3f}"


def _share(part: float) -> str:
    return _UNKNOWN if math.isnan(part) else f"{part:.1%}"


def _lines(table: Table) -> Iterator[str]:
    yield table.title
    widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
    for row in (table.columns, *table.rows) if table.rows else ():
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()
    yield from table.remarks
