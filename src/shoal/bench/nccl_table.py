"""The text of a run: nccl-tests' table, and below it percentiles, CPU, the wire and peers.

The lines below the table begin with `#`, so parsers of nccl-tests skip them as comments.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import shoal

if TYPE_CHECKING:
    from shoal.bench.measured import Figures, SizePoint
    from shoal.bench.sweep import CallKind, Sweep

_HEAD: Final = (
    "#\n"
    f"# {'':>10}  {'':>12}  {'':>8}  {'':>6}  {'':>6}           out-of-place           "
    "            in-place          \n"
)
_NO_FIGURES: Final = f"  {'N/A':>7}  {'N/A':>6}  {'N/A':>6}  {'N/A':>6}"


def head(sweep: Sweep, kind: CallKind, ranks: Sequence[Mapping[str, Any]]) -> str:
    """Return the text before the rows; `ranks` has the pid and host of each."""
    sizes = sweep.sizes
    step = f"{sizes.factor}(factor)" if sizes.factor > 1 else f"{sizes.step}(bytes)"
    apart = "# Blocking Enabled: a barrier before each call\n" * sweep.is_apart
    devices = "".join(
        f"#  Rank {rank:2} Group  0 Pid {who['pid']:6} on {who['host']:>10} device {rank:2} CPU\n"
        for rank, who in enumerate(ranks)
    )
    return (
        f"# shoal bench version {shoal.__version__}, in the format of nccl-tests\n"
        f"# Collective test starting: {kind.experiment}\n"
        f"# nThread 1 nGpus 1 minBytes {sizes.least} maxBytes {sizes.most} step: {step} "
        f"warmup iters: {sweep.n_warmup} iters: {sweep.n_calls} agg iters: 1 "
        f"validation: {sweep.n_checks} graph: 0 unalign: 0\n"
        f"{apart}#\n# Using devices\n{devices}{_columns()}"
    )


def _columns() -> str:
    figures = f"  {'time':>7}  {'algbw':>6}  {'busbw':>6}  {'#wrong':>6}"
    units = f"  {'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6}  {'':>6}"
    return (
        f"{_HEAD}"
        f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}{figures}{figures}\n"
        f"# {'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}{units}{units}\n"
    )


def row(point: SizePoint) -> str:
    """Return one size: shoal out of place and in place; N/A if there is no such way."""
    kind = point.kind
    preamble = (
        f"{point.n_bytes:12}  {point.count:12}  {kind.element.nccl:>8}  {kind.redop:>6}  "
        f"{kind.root:6}"
    )
    ways = [point.ours(in_place) for in_place in (False, True)]
    return preamble + "".join(_NO_FIGURES if way is None else _figures(way) for way in ways) + "\n"


def foot(kind: CallKind, n_wrong: int, bus_gb_s: float) -> str:
    """Return the text after the rows.

    Args:
        n_wrong: rows with a wrong element.
        bus_gb_s: the mean over rows and ways.
    """
    verdict = "FAILED" if n_wrong else "OK"
    return (
        f"# {'Out of bounds values':<20} : {n_wrong} {verdict}\n"
        f"# {'Avg bus bandwidth':<20} : {bus_gb_s:g} \n"
        f"#\n# Collective test concluded: {kind.experiment}\n"
    )


def _figures(way: Figures) -> str:
    wrong = f"{way.n_wrong:6g}" if way.n_wrong is not None else "   N/A"
    time, alg, bus = (
        number(way.times.avg * 1e6, 7),
        number(way.alg_gb_s, 6),
        number(way.bus_gb_s, 6),
    )
    return f"  {time}  {alg}  {bus}  {wrong}"


def number(value: float, width: int) -> str:
    """Return a number in `width` columns, with as many decimals as fit, two at most."""
    n_digits = len(str(int(value))) if value >= 1 else 0
    if n_digits < width - 2:
        return f"{value:{width}.2f}"
    if n_digits < width - 1:
        return f"{value:{width}.1f}"
    if n_digits < width + 1:
        return f"{value:{width}.0f}"
    return f"{value:{width}.1e}" if width >= 7 else f"{value:{width}.0e}"


def beside(points: Sequence[SizePoint], n_rounds: int) -> str:
    """Return the lines below the table, one for each library and size."""
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
        [str(point.n_bytes), *_cells(point, one), ""]
        for point in points
        for one in point.figures
        if not one.failure
    ]
    text = [
        "#\n# Percentiles of the same calls, and a rank's cost per call: CPU, bytes over NICs\n",
        f"# ratio: a peer's time over shoal's, the median of {n_rounds} rounds\n",
    ]
    if any(point.least_s for point in points):
        text.append("# of line: the least time at the rate of TCP over the lab's NICs, over p50\n")
    lines = align([[*columns, ""], [*columns.values(), ""], *body])
    text += [f"#{line}\n" for line in lines]
    text += [f"# no {text}\n" for text in dict.fromkeys(_missing(points))]
    return "".join(text)


def _cells(point: SizePoint, one: Figures) -> Iterator[str]:
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
    yield f"{point.least_s / times.p50:.0%}" if point.least_s and times.p50 else ""


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
