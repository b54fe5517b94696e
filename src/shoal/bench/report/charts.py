"""Draws one kind of call with matplotlib, as SVG for a page.

The colours are Okabe and Ito's, which colour-blind people can distinguish. Each library has its own
marker as well.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from shoal.plan.text import show_bytes, show_us

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from shoal.bench.record import BenchRecord, CallName, Measured

COLOURS: Final[Mapping[str, str]] = {
    "shoal": "#0072b2",
    "gloo": "#d55e00",
}
STYLE: Final[Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "shoal",
    "font.size": 9.5,
    "text.parse_math": False,  # a file or a parameter may have dollars in its name
}
_MARKS: Final = {"shoal": "o", "gloo": "s"}
_LINES: Final = ("-", "--", ":", "-.")
_INCHES: Final = (4.7, 3.8)
_FEWEST_CALLS: Final = 5
"""The ratio of fewer calls is left to chance."""
_MOST_TICKS: Final = 7


class Chart(NamedTuple):
    """One picture."""

    title: str
    figure: Figure


class _Line(NamedTuple):
    """One library of one file; the file's name is empty if there is only one."""

    record: str
    library: str
    dashes: str
    points: Sequence[Measured]

    @property
    def label(self) -> str:
        return self.library + (f", {self.record}" if self.record else "")


def charts_of(call: CallName, records: Sequence[BenchRecord]) -> list[Chart]:
    """Draw time, bus bandwidth, and ratios if there are peers."""
    lines = list(_lines_of(call, records))
    compared = [
        line._replace(points=points)
        for line in lines
        if (points := [point for point in line.points if is_comparable(point)])
    ]
    with mpl.rc_context(STYLE):
        time, axes = _axes("time of a call: median, and up to p99", show_us)
        for line in lines:
            edges = ([p.size, p.p50_us, p.p99_us] for p in line.points)
            sizes, p50, p99 = zip(*edges, strict=True)
            axes.fill_between(sizes, p50, p99, color=_ink(line.library), alpha=0.13, linewidth=0)
        _plot(axes, lines, lambda point: point.p50_us)
        _plot_limits(axes, lines, lambda _point, least_us: least_us)
        _finish(time, axes, lines)
        bandwidth, axes = _axes("bus bandwidth at the median", show_rate)
        _plot(axes, lines, lambda point: point.bus_bytes_per_s)
        _plot_limits(axes, lines, lambda p, least_us: p.bus_bytes_per_s * p.p50_us / least_us)
        _finish(bandwidth, axes, lines)
        charts = [
            Chart("Time of a call", time),
            Chart("Bus bandwidth", bandwidth),
        ]
        if compared:
            ratios, axes = _axes("time of the peer / time of shoal", lambda ratio: f"{ratio:g}x")
            axes.axhline(1, color=_ink("shoal"), linewidth=1.6)
            _plot(axes, compared, lambda point: point.ratio or math.nan)
            _finish(ratios, axes, compared)
            charts.append(Chart("Peers beside shoal; above 1 shoal is faster", ratios))
    return charts


def is_comparable(point: Measured) -> bool:
    """Return True if there is a ratio from enough calls to be meaningful."""
    return point.ratio is not None and point.n_calls >= _FEWEST_CALLS


def svg_of(chart: Chart, label: str) -> str:
    """Return the picture for a page."""
    buffer = io.StringIO()
    with mpl.rc_context(STYLE):
        chart.figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _lines_of(call: CallName, records: Sequence[BenchRecord]) -> Iterator[_Line]:
    for number, record in enumerate(records):
        for library, points in record.series.get(call, {}).items():
            name = record.name if len(records) > 1 else ""
            ordered = sorted(points, key=lambda point: point.size)
            yield _Line(name, library, _LINES[number % len(_LINES)], ordered)


def _axes(what: str, show: Callable[[float], str]) -> tuple[Figure, Axes]:
    figure = Figure(figsize=_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylabel(what)
    axes.set_xlabel("size")
    axes.grid(visible=True, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: show(value)))
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0), numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    return figure, axes


def _plot(axes: Axes, lines: Sequence[_Line], value: Callable[[Measured], float]) -> None:
    for line in lines:
        is_ours = line.library == "shoal"
        axes.plot(
            [point.size for point in line.points],
            [value(point) for point in line.points],
            color=_ink(line.library),
            linestyle=line.dashes,
            linewidth=1.8 if is_ours else 1.4,
            marker=_MARKS.get(line.library, "v"),
            markersize=4.5,
            markeredgewidth=0,
            label=line.label,
            zorder=3 if is_ours else 2.5,
        )


def _plot_limits(
    axes: Axes, lines: Sequence[_Line], value: Callable[[Measured, float], float]
) -> None:
    """Draw the network's limit, once for each file, from any of its libraries."""
    for line in {line.record: line for line in reversed(lines)}.values():
        best = [(p.size, value(p, p.least_us)) for p in line.points if p.least_us]
        if best:
            style = ":" if line.dashes == "-" else line.dashes
            label = "the line (TCP)" + (f", {line.record}" if line.record else "")
            mark = "_" if len(best) == 1 else ""
            axes.plot(*zip(*best, strict=True), "k", linestyle=style, marker=mark, label=label)


def _finish(figure: Figure, axes: Axes, lines: Sequence[_Line]) -> None:
    """Set ticks at the measured sizes, room for a narrow range, and the legend below."""
    ordered = sorted({point.size for line in lines for point in line.points})
    axes.xaxis.set_major_locator(FixedLocator(ordered[:: -(-len(ordered) // _MOST_TICKS)]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: show_bytes(value)))
    low, high = axes.get_ylim()
    room = max(1.0, math.sqrt(6 * low / high))
    axes.set_ylim(low / room, high * room)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)


def _ink(name: str) -> Any:
    return COLOURS.get(name, "dimgray")


def show_rate(bytes_per_s: float) -> str:
    """Return a rate in powers of 1000: 50 MB/s, 1.2 GB/s."""
    for unit, name in ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if bytes_per_s >= unit * 0.9995:
            return f"{bytes_per_s / unit:.3g} {name}"
    return f"{bytes_per_s:.3g} B/s"
