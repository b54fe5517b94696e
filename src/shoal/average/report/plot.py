"""A picture of a report: the mean step of each rank, and the buffers of one step.

After the latency breakdown of Li et al., "PyTorch Distributed" (VLDB 2020), figure 6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from shoal.average.report.breakdown import backward_of, forward_of, waits_of
from shoal.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from shoal.average.report.breakdown import Interval
    from shoal.average.report.report import AveragingReport
    from shoal.average.step_times import StepTimes

_MOST_ROWS: Final = 32  # more bars cannot be told apart

_COLOURS: Final = {
    "forward": "tab:cyan",
    "backward": "tab:blue",
    "exposed": "tab:orange",
    "other": "lightgray",
    "hidden": "tab:green",
}
# Without an outline, which would make a short wait a black bar.
_WAITED: Final[Any] = {
    "color": _COLOURS["exposed"],
    "edgecolor": "black",
    "hatch": "///",
    "linewidth": 0,
}


def plot(report: AveragingReport, path: Path) -> None:
    """Draw a report as a PNG; UsageError without matplotlib, or if no step has ended."""
    if not report.steps:
        raise UsageError(f"{report.name}: no step has ended yet, so there is nothing to draw")
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plot draws with matplotlib: pip install matplotlib") from None
    ordered = sorted(report.steps, key=lambda step: step.total)
    number = ordered[len(ordered) // 2].number
    step = next(times for times in report.times if times.number == number)
    heights = [min(n, _MOST_ROWS) * 0.3 + 1.0 for n in (len(report.ranks), len(step.posted))]
    with mpl.rc_context({"text.parse_math": False}):  # a parameter's name may have dollars in it
        figure = Figure(figsize=(8, sum(heights) + 1.7), layout="constrained", dpi=150)
        FigureCanvasAgg(figure)
        ranks, buffers = figure.subplots(2, height_ratios=heights)
        _draw_ranks(ranks, report)
        _draw_buffers(buffers, step)
        figure.legend(*ranks.get_legend_handles_labels(), loc="outside lower center", ncols=3)
        figure.suptitle(f"{report.name}\nwhere the time of {len(report.steps)} steps went")
        figure.savefig(path, format="png")


def _draw_ranks(axes: Any, report: AveragingReport) -> None:
    shown = report.ranks[:_MOST_ROWS]

    def bar(place: float, us: float, left: float, height: float, label: str, **style: Any) -> None:
        once = label if place < 1 else None
        axes.barh(place, us / 1e3, height, left / 1e3, label=once, **style)

    for place, one in enumerate(shown):
        left = 0.0
        for part in ("forward", "backward", "exposed", "other"):
            bar(place, getattr(one, part), left, 0.5, part, color=_COLOURS[part])
            if part == "exposed":
                bar(place, one.waited, left, 0.5, "waited for the slowest rank", **_WAITED)
            left += getattr(one, part)
        bar(place + 0.36, one.hidden, one.forward, 0.14, "hidden", color=_COLOURS["hidden"])
    axes.set_yticks(range(len(shown)), [f"rank {one.rank}" for one in shown])
    axes.invert_yaxis()
    axes.set_xlabel("ms in a mean step")
    if (slowest := report.slowest) is not None:
        of_all = f"{slowest.n_slowest} of {report.n_compared} steps"
        axes.set_title(f"rank {slowest.rank} was the slowest in {of_all}", fontsize="medium")


def _draw_buffers(axes: Any, step: StepTimes) -> None:
    def bar(interval: Interval, number: int, height: float, part: str) -> None:
        begin, end = ((moment - step.start) / 1e6 for moment in interval)
        axes.barh(number, end - begin, left=begin, height=height, color=_COLOURS[part])

    waits = waits_of(step)
    passes = {"forward": [forward_of(step)], "backward": [backward_of(step)], "exposed": waits}
    for part, intervals in passes.items():
        for begin, end in intervals:
            ends = ((moment - step.start) / 1e6 for moment in (begin, end))
            axes.axvspan(*ends, color=_COLOURS[part], alpha=0.25, linewidth=0)
    numbers = [n for n, done in enumerate(step.done) if done and step.posted[n]][:_MOST_ROWS]
    for number in numbers:
        posted, done = step.posted[number], step.done[number]
        bar((step.full[number] or posted, posted), number, 0.3, "other")
        bar((posted, done), number, 0.6, "hidden")
        for begin, end in waits:  # drawn over what was hidden
            if max(begin, posted) < min(end, done):
                bar((max(begin, posted), min(end, done)), number, 0.6, "exposed")
    axes.invert_yaxis()
    axes.set_ylabel("fusion buffer")
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel(f"ms since step {step.number} began: each buffer, on its way")
