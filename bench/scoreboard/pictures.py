"""Pictures of the tables of trainings, and the tables beside them."""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from shoal.bench.report.charts import COLOURS, STYLE

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.scoreboard.benchmark import Section

Rows = Sequence[Mapping[str, Any]]

_DPI: Final = 150
_WIDTH: Final = 0.8  # of all bars of a row together
_BARS: Final = (
    COLOURS["gloo"],
    "#009e73",
    COLOURS["shoal"],
    "#b8568c",
    "dimgray",
    "black",
    "#56b4e9",
    "#e69f00",
)


def draw_table(folder: Path, section: Section, text: str, rows: Rows) -> None:
    """Write a table, and its picture if it has one and was measured."""
    folder.joinpath(f"{section.name}.txt").write_text(text, encoding="utf-8")
    picture = _PICTURES.get(section.name)
    measured = [row for row in rows if _medians(row)]
    if picture is None or not measured:
        return
    with mpl.rc_context(STYLE):
        figure = picture(measured)
        title = textwrap.fill(section.title, 64 * len(figure.axes))
        figure.suptitle(title, fontsize=10)
        figure.savefig(folder / f"{section.name}.png", dpi=_DPI)


def _medians(row: Mapping[str, Any]) -> dict[str, float]:
    return {label: statistics.median(values) for label, values in row["rounds"].items() if values}


def _figure(n: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(4.7 * n, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    made: Any = figure.subplots(1, n, squeeze=False)
    for axes in made[0]:
        axes.grid(visible=True, axis="y", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, list(made[0])


def _bars(*labels: str, what: str = "ms", times: float = 1e3) -> Callable[[Rows], Figure]:
    """Draw a group of bars for each row, a bar for each of these columns."""

    def draw(rows: Rows) -> Figure:
        figure, (axes,) = _figure()
        figure.set_figwidth(max(4.7, 0.55 * len(rows) * len(labels)))
        width = _WIDTH / len(labels)
        for number, label in enumerate(labels):
            places = [place + number * width - _WIDTH / 2 + width / 2 for place in range(len(rows))]
            heights = [times * _medians(row).get(label, float("nan")) for row in rows]
            drawn = axes.bar(places, heights, width * 0.94, color=_BARS[number], label=label)
            texts = ["" if math.isnan(one) else f"{float(f'{one:.3g}'):g}" for one in heights]
            axes.bar_label(drawn, texts, fontsize=7, padding=1)
        axes.set_xticks(range(len(rows)), [row["row"].replace(", ", "\n", 1) for row in rows])
        axes.set_ylabel(what)
        _legend(figure, axes)
        return figure

    return draw


def _breakdown(rows: Rows) -> Figure:
    """Draw computation and exposed communication as parts of Gloo's step without overlap."""
    figure, every = _figure(len(rows))
    kinds = {
        "Gloo,\nno overlap": ("gloo late", "computing torch"),
        "Gloo": ("gloo", "computing torch"),
        "torch's\nover shoal": ("torch", "computing torch"),
        "shoal,\nno overlap": ("shoal late", "computing"),
        "shoal": ("shoal", "computing"),
    }
    for axes, row in zip(every, rows, strict=True):
        medians = _medians(row)
        whole = medians.get("gloo late") or max(medians.values())
        for place, (step, computing) in enumerate(kinds.values()):
            if step not in medians or computing not in medians:
                continue
            low = min(medians[computing], medians[step]) / whole
            rest = medians[step] / whole - low
            bars = {"forward, backward, optimizer": (low, 0), "exposed communication": (rest, low)}
            for number, (label, (height, bottom)) in enumerate(bars.items()):
                colour = "dimgray" if number == 0 else COLOURS["gloo"]
                axes.bar(place, height, 0.7, bottom, color=colour, label=label if not place else "")
            axes.text(
                place,
                low + rest,
                f"{medians[step] * 1e3:.0f} ms",
                ha="center",
                va="bottom",
                fontsize=7.5,
            )
        axes.set_xticks(range(len(kinds)), list(kinds), fontsize=7)
        axes.set_title(row["row"], fontsize=9)
    every[0].set_ylabel("a step, as a part of Gloo's without overlap")
    _legend(figure, every[0])
    return figure


def _curves(what: str, own: str = "") -> Callable[[Rows], Figure]:
    """Draw a picture for each row: columns named by library and number, by number."""

    def draw(rows: Rows) -> Figure:
        figure, every = _figure(len(rows))
        for axes, row in zip(every, rows, strict=True):
            medians, numbers = _medians(row), set[float]()
            for library in ("gloo", "shoal"):
                points = sorted(
                    (_number(match[1]), 1e3 * value)
                    for label, value in medians.items()
                    if (match := re.fullmatch(rf"{library} ([\d/]+)", label))
                )
                numbers.update(number for number, _ in points)
                axes.plot(*zip(*points, strict=True), "o-", color=COLOURS[library], label=library)
            if own in medians:
                axes.axhline(1e3 * medians[own], color=COLOURS["shoal"], linestyle=":", label=own)
            _tick(axes, numbers)
            axes.set_ylim(bottom=0)
            axes.set_xlabel(what)
            axes.set_title(row["row"], fontsize=9)
        every[0].set_ylabel("ms")
        _legend(figure, every[0])
        return figure

    return draw


def _scaling(rows: Rows) -> Figure:
    """Draw a step by hosts for each model; dashed with a server for each worker."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, every = _figure(len(models))
    for axes, model in zip(every, models, strict=True):
        own = [row for row in rows if row["model"] == model]
        for number, label in enumerate(("gloo", "computing", "shoal")):
            for is_served, dashes in ((False, "o-"), (True, "s--")):
                points = [
                    (row["n_ranks"], 1e3 * _medians(row)[label])
                    for row in own
                    if label in _medians(row) and bool(row["n_servers"]) == is_served
                ]
                if points and not (is_served and label in ("gloo", "computing")):
                    name = f"{label}, servers" if is_served else label
                    axes.plot(*zip(*points, strict=True), dashes, color=_BARS[number], label=name)
        _tick(axes, {row["n_ranks"] for row in own})
        axes.set_ylim(bottom=0)
        axes.set_xlabel("hosts, a worker on each")
        axes.set_title(model, fontsize=9)
    every[0].set_ylabel("ms")
    _legend(figure, every[0])
    return figure


def _tick(axes: Axes, numbers: Collection[float]) -> None:
    """Set a logarithmic axis with ticks at the measured values."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted(numbers)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))


def _number(text: str) -> float:
    over, _, under = text.partition("/")
    return float(over) / float(under or 1)


def _legend(figure: Figure, axes: Axes) -> None:
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=8,
    )


_PICTURES: Final[Mapping[str, Callable[[Rows], Figure]]] = {
    "training-python": _bars(
        "torch 100", "shoal 100", "torch 1000", "shoal 1000", what="us of CPU time", times=1e6
    ),
    "training-host": _bars("gloo", "torch", "shoal", "kept"),
    "training-breakdown": _breakdown,
    "training-hidden": _bars("alone", "window", "exposed"),
    "training-buckets": _curves("MiB of a bucket", own="shoal's own"),
    "training-skipped": _curves("passes from one average to the next"),
    "training-flight": _bars(
        "gloo", "gloo 3 groups", "one by one", "two at once", "1 group", "2 groups", "3 groups"
    ),
    "training-scaling": _scaling,
    "training-served": _bars("gloo", "torch", "shoal", "bf16"),
}
