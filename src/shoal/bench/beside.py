"""What nccl-tests has no column for: percentiles, CPU, the wire, and peers of the same run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from shoal.bench.columns import way_of
from shoal.bench.limits import share_of
from shoal.bench.nccl_table import number
from shoal.bench.table import align

if TYPE_CHECKING:
    from shoal.bench.limits import Limit
    from shoal.bench.points import Figures, SizePoint


def beside(points: Sequence[SizePoint], n_rounds: int, limit: Limit | None) -> str:
    """The same calls again, a line for each library: comments, to a reader of nccl-tests."""
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
        if one.times
    ]
    told = [
        "#\n# Percentiles of the same calls, and what a call costs a rank: CPU, bytes over NICs\n",
        f"# ratio: how many times as long as shoal a peer takes, the median of {n_rounds} rounds\n",
    ]
    told += ["# of line: the least time at the rate of raw TCP streams, over p50\n"] * bool(limit)
    lines = align([[*columns, ""], [*columns.values(), ""], *body])
    told += [f"#{line}\n" for line in lines]
    told += [f"# no {text}\n" for text in dict.fromkeys(_missing(points))]
    return "".join(told)


def _cells(point: SizePoint, one: Figures, limit: Limit | None) -> Iterator[str]:
    assert one.times is not None  # asked before
    assert one.taken is not None  # likewise
    times, taken = one.times, one.taken
    yield way_of(one.in_place)
    yield one.library
    yield from (number(time_s * 1e6, 7) for time_s in (times.p50, times.p95, times.p99))
    yield number(statistics.fmean(taken.cpu_s) * 1e6, 7)
    for rounds in (taken.sent, taken.received):
        yield f"{statistics.fmean(rounds):.0f}" if rounds else "-"
    yield "N/A" if one.n_wrong is None else str(one.n_wrong)
    yield "" if one.ratio is None else f"{one.ratio:.2f}"
    share = share_of(limit, point, times.p50)
    yield "" if share is None else f"{share:.0%}"


def _missing(points: Sequence[SizePoint]) -> Iterator[str]:
    for point in points:
        for one in point.figures:
            if one.failure:
                what = f"{one.library}, {point.kind.collective} {way_of(one.in_place)}"
                yield f"{what}: {one.failure}"
