"""A picture of a report: the mean step of each rank, and the buffers of one step.

After the latency breakdown of Li et al., "PyTorch Distributed" (VLDB 2020), figure 6.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal.average.report.breakdown import backward_of, forward_of, waits_of
from shoal.errors import UsageError
from shoal.inks import DPI, INKS, STYLE

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.average.report.breakdown import Interval
    from shoal.average.report.report import AveragingReport
    from shoal.average.step_times import StepTimes

_INCHES: Final = 8.0
_ROW: Final = 0.42
_BELOW: Final = 0.5  # of an axis: its numbers and its label, in inches
_MOST_ROWS: Final = 32  # more bars are no picture

# Of a step, in their order; the last one is not a part of it, but runs beside it.
_PARTS: Final = (
    ("forward", "forward", "sky", ""),
    ("backward", "backward", "blue", ""),
    ("exposed communication", "exposed", "orange", ""),
    ("other", "other", "grid", ""),
)


def plot(report: AveragingReport, path: Path) -> None:
    """Draw it as a PNG.

    Raises:
        UsageError: matplotlib is not installed, or no step has ended.
        OSError: it cannot be written.
    """
    if not report.steps:
        raise UsageError(f"{report.name}: no step has ended yet, so there is nothing to draw")
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plot draws with matplotlib: pip install 'shoal[report]'") from None
    step = _median_step(report)
    rows = _rows(report)
    heights = [_ROW * len(rows) + 0.4, _ROW * min(len(step.posted), _MOST_ROWS) * 0.6 + 0.8]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(_INCHES, sum(heights) + 1.6), layout="constrained")
        FigureCanvasAgg(figure)
        ranks, buffers = figure.subplots(2, height_ratios=heights)
        _draw_ranks(ranks, report, rows)
        _draw_buffers(buffers, step)
        figure.suptitle(f"{report.name}\nwhere the time of {len(report.steps)} steps went")
        figure.savefig(path, dpi=DPI, format="png")


def _median_step(report: AveragingReport) -> StepTimes:
    ordered = sorted(report.steps, key=lambda step: step.total)
    number = ordered[len(ordered) // 2].number
    return next(times for times in report.times if times.number == number)


def _rows(report: AveragingReport) -> list[tuple[str, dict[str, float]]]:
    """A name for each bar, and its parts in milliseconds."""
    if report.ranks:
        some = report.ranks[:_MOST_ROWS]
        return [(f"rank {one.rank}", _in_ms([one])) for one in some]
    return [(f"rank {report.rank}", _in_ms(report.steps))]


def _in_ms(steps: Sequence[Any]) -> dict[str, float]:
    fields = (*(field for _, field, _, _ in _PARTS), "hidden")
    found = {f: sum(getattr(one, f) for one in steps) / len(steps) / 1e3 for f in fields}
    if math.isnan(found["hidden"]):  # nobody knows: there is nothing to draw
        found["hidden"] = 0.0
    return {**found, "waited": sum(getattr(one, "waited", 0.0) for one in steps) / 1e3}


def _draw_ranks(axes: Any, report: AveragingReport, rows: Sequence[tuple[str, Any]]) -> None:
    for place, (_, parts) in enumerate(rows):
        left = 0.0
        for label, field, ink, _ in _PARTS:
            bar: dict[str, Any] = {"left": left, "color": INKS[ink], "height": 0.5}
            axes.barh(place, parts[field], label=None if place else label, **bar)
            if field == "exposed" and parts["waited"]:
                axes.barh(
                    place,
                    parts["waited"],
                    left=left,
                    height=0.5,
                    color="none",
                    edgecolor=INKS["paper"],
                    hatch="////",
                    linewidth=0,
                )
            left += parts[field]
        axes.barh(
            place + 0.36,
            parts["hidden"],
            left=parts["forward"],
            height=0.14,
            color=INKS["green"],
            label=None if place else "hidden communication",
        )
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms in a mean step")
    slowest = report.slowest
    if slowest is not None:
        axes.set_title(
            f"hatched: waited for the slowest rank, which was rank {slowest.rank} in "
            f"{slowest.n_slowest} of {report.n_compared} steps",
            fontsize=8.5,
            loc="left",
        )
    _finish(axes)


def _draw_buffers(axes: Any, step: StepTimes) -> None:
    zero = step.start
    numbers = [n for n, done in enumerate(step.done) if done and step.posted[n]][:_MOST_ROWS]

    def ms(moment: int) -> float:
        return (moment - zero) / 1e6

    for (begin, end), ink in ((forward_of(step), "sky"), (backward_of(step), "blue")):
        axes.axvspan(ms(begin), ms(end), color=INKS[ink], alpha=0.25, linewidth=0)
    for begin, end in waits_of(step):
        axes.axvspan(ms(begin), ms(end), color=INKS["orange"], alpha=0.25, linewidth=0)
    for number in numbers:
        posted, done = step.posted[number], step.done[number]
        full = step.full[number] or posted
        axes.barh(number, ms(posted) - ms(full), left=ms(full), height=0.3, color=INKS["soft"])
        for (begin, end), is_exposed in parted((posted, done), waits_of(step)):
            ink = INKS["orange" if is_exposed else "green"]
            axes.barh(number, ms(end) - ms(begin), left=ms(begin), height=0.6, color=ink)
    axes.set_ylim((max(numbers, default=0) + 0.6, min(numbers, default=0) - 0.6))
    axes.set_ylabel("fusion buffer")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(
        f"ms since step {step.number} began: from when each buffer left until it was in; "
        "green: hidden, orange: exposed"
    )
    _finish(axes)


def parted(flight: Interval, waits: Sequence[Interval]) -> list[tuple[Interval, bool]]:
    """A buffer's way in pieces, each with whether the rank waited meanwhile.

    Args:
        waits: apart and in order.
    """
    begin, end = flight
    pieces: list[tuple[Interval, bool]] = []
    for wait in waits:
        since, until = max(begin, wait[0]), min(end, wait[1])
        if since >= until:
            continue
        pieces += [((begin, since), False), ((since, until), True)]
        begin = until
    return [piece for piece in (*pieces, ((begin, end), False)) if piece[0][1] > piece[0][0]]


def _finish(axes: Any) -> None:
    axes.grid(visible=True, axis="x", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        from matplotlib.transforms import ScaledTranslation

        below = ScaledTranslation(0, -_BELOW, axes.figure.dpi_scale_trans)
        axes.legend(
            handles,
            labels,
            loc="upper center",
            bbox_to_anchor=(0.5, 0.0),
            bbox_transform=axes.transAxes + below,
            ncols=3,
            frameon=False,
            fontsize=8.5,
        )
