"""The lines below the table: percentiles, CPU, the wire, and peers of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shoal.bench.nccl_table import number

if TYPE_CHECKING:
    from shoal.bench.limits import Limit
    from shoal.bench.measured import Figures, SizePoint


def beside(points: Sequence[SizePoint], n_rounds: int, limit: Limit | None) -> str:
    """Return a line for each library and size; comments to a reader of nccl-tests."""
    columns = {
        "size": "(B)",
        "way": "",
        "library": "",
        **dict.fromkeys(("p50", "p95", "p99"), "(us)"),
        "CPU": "(us/rank)",
        **dict.fromkeys(("sent", "received"), "(B/rank)"),
        "#wrong": "",
        "ratio": "",
        "of line": "",
    }
    body = [
        [str(point.n_bytes), *_cells(point, one, limit), ""]
        for point in points
        for one in point.figures
        if not one.failure
    ]
    text = [
        "#\n# Percentiles of the same calls, and what a call costs a rank: CPU, bytes over NICs\n",
        f"# ratio: how many times as long as shoal a peer takes, the median of {n_rounds} rounds\n",
    ]
    text += ["# of line: the least time at the rate of raw TCP streams, over p50\n"] * bool(limit)
    lines = align([[*columns, ""], [*columns.values(), ""], *body])
    text += [f"#{line}\n" for line in lines]
    text += [f"# no {text}\n" for text in dict.fromkeys(_missing(points))]
    return "".join(text)


def _cells(point: SizePoint, one: Figures, limit: Limit | None) -> Iterator[str]:
    times = one.times
    yield one.way
    yield one.library
    yield from (number(time_s * 1e6, 7) for time_s in (times.p50, times.p95, times.p99))
    yield number(statistics.fmean(one.cpu_s) * 1e6, 7)
    for rounds in (one.sent, one.received):
        yield f"{statistics.fmean(rounds):.0f}" if rounds else "-"
    yield "N/A" if one.n_wrong is None else str(one.n_wrong)
    ratio = point.ratio(one)
    yield "" if ratio is None else f"{ratio:.2f}"
    least_s = limit.time_s(point.kind.collective, point.n_bytes) if limit else None
    yield f"{least_s / times.p50:.0%}" if least_s and times.p50 else ""


def _missing(points: Sequence[SizePoint]) -> Iterator[str]:
    for point in points:
        for one in point.figures:
            if one.failure:
                yield f"{one.library}, {point.kind.collective} {one.way}: {one.failure}"


def align(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return columns as wide as their widest cell, numbers flush right; the last cell is text."""
    widths = [max(map(len, column)) for column in zip(*(line[:-1] for line in lines), strict=True)]
    return [
        "  ".join(
            ["", *(cell.rjust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]
        ).rstrip()
        for line in lines
    ]
