"""Where the time of the last steps went, and all that can be made of it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from shoal.average.report.breakdown import backward_of, break_down
from shoal.average.report.chrome import merge_into, trace_of
from shoal.average.report.compared import compare, gather
from shoal.average.report.flight import FlightRecord, write_dump
from shoal.average.report.tables import tables_of, text_of

if TYPE_CHECKING:
    from os import PathLike

    from shoal.average.layout import Layout
    from shoal.average.report.breakdown import StepBreakdown
    from shoal.average.report.compared import RankTimes
    from shoal.average.step_times import StepTimes


class Timed(Protocol):
    """What reports tell of: an `Averager`, or what a front end averages by another way."""

    @property
    def name(self) -> str:
        """The same on every rank."""

    @property
    def group(self) -> Any:
        """A `Group`, or what has a rank, a size, members and an `all_gather` as that."""

    @property
    def layout(self) -> Layout:
        """The buffers."""

    @property
    def device(self) -> str:
        """Where arrays are; "": in host memory."""

    @property
    def times(self) -> Sequence[StepTimes]:
        """Of the last steps that have ended, the oldest first."""

    @property
    def times_now(self) -> StepTimes | None:
        """Of the step under way; None: there is none."""

    def missing(self) -> list[str]:
        """The arrays that have not become ready in the step under way."""


class BufferTimes(NamedTuple):
    """One fusion buffer of the newest layout in a mean step, in microseconds.

    Args:
        arrays: the names of the first and the last array in it; "" where there is none.
        n_sent: in so many steps it was sent.
        full, posted, done: how long after the backward pass began it was full, its call was
            started, and had ended. NaN: it never was, or nobody knows, as of a device.
        waited: how long the rank waited for it, when it had waited for those before.
    """

    number: int
    n_bytes: int
    arrays: tuple[str, str]
    n_sent: int
    full: float
    posted: float
    done: float
    waited: float


@dataclasses.dataclass(frozen=True)
class AveragingReport:
    """Where the time of the last steps went on this rank, and how ranks compare.

    `print(report)` shows tables; with `rich` installed, `rich.print(report)` shows them in colours.

    Attributes:
        name: of the averager.
        rank, size: of its group.
        steps: those that have ended, the oldest first; the last one not, as nobody knows how long
            it lasts.
        buffers: of the newest layout.
        ranks: the mean steps of all ranks; empty if this one was alone.
        n_compared: in so many steps ranks were compared.
        missing: the arrays that have not become ready in a step under way.
        device: where the arrays are: times are those of the host, which does not wait for what it
            gives a device to compute; "": in host memory.
        times: of the steps that have ended, and of the one under way.
    """

    name: str
    rank: int
    size: int
    steps: tuple[StepBreakdown, ...]
    buffers: tuple[BufferTimes, ...]
    ranks: tuple[RankTimes, ...]
    n_compared: int
    missing: tuple[str, ...]
    device: str
    times: tuple[StepTimes, ...] = dataclasses.field(repr=False)
    calls: FlightRecord = dataclasses.field(repr=False)

    @property
    def slowest(self) -> RankTimes | None:
        """The rank that held the others up most; None: ranks were not compared."""
        if len(self.ranks) < 2 or not self.n_compared:
            return None
        return max(self.ranks, key=lambda one: one.held_up)

    @property
    def hidden_share(self) -> float:
        """How much of the communication nobody waited for, from 0 to 1; 1 where there is none.

        NaN: of a device, nobody knows.
        """
        hidden = sum(step.hidden for step in self.steps)
        whole = hidden + sum(step.exposed for step in self.steps)
        return hidden / whole if whole else 1.0

    def __str__(self) -> str:
        return text_of(tables_of(self))

    def __rich__(self) -> Any:
        from shoal.average.report.coloured import coloured  # rich calls this, so it is there

        return coloured(tables_of(self))

    def to_json(self) -> str:
        """All but the times of single steps' buffers, as JSON; times in microseconds.

        What is not known is null.
        """
        told = {
            "name": self.name,
            "rank": self.rank,
            "size": self.size,
            "device": self.device,
            "hidden_share": _or_none(self.hidden_share),
            "slowest": self.slowest.rank if self.slowest else None,
            "n_compared": self.n_compared,
            "missing": self.missing,
            "steps": [_plain(step) for step in self.steps],
            "buffers": [_plain(buffer) for buffer in self.buffers],
            "ranks": [_plain(rank) for rank in self.ranks],
        }
        return json.dumps(told, indent=1)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draw where the time went, by rank, and one step's buffers; a PNG.

        Raises:
            UsageError: matplotlib is not installed, or no step has ended.
            OSError: it cannot be written.
        """
        from shoal.average.report.plot import plot

        plot(self, Path(path))

    def chrome_trace(
        self, path: str | PathLike[str], beside: str | PathLike[str] | None = None
    ) -> None:
        """Write the steps of this rank as a trace for Perfetto, or chrome://tracing.

        Args:
            beside: a trace that torch's profiler has exported in this process, `.json` or
                `.json.gz`: what is written has both, on one clock.

        Raises:
            OSError, ValueError: it cannot be written, or `beside` cannot be read.
        """
        events = trace_of(self.times, self.rank)
        merge_into(Path(path), events, None if beside is None else Path(beside))

    def flight_record(self, prefix: str | PathLike[str]) -> Path:
        """Write the calls of these steps as torch's flight recorder does, for its analyzer.

        With a file of every rank, `torchfrtrace --prefix rank_ traces/` tells which rank has missed
        which call, where all wrote to `traces/rank_`.

        Args:
            prefix: of the file's name, to which the number of the rank is added.

        Returns:
            The file.

        Raises:
            OSError: it cannot be written.
        """
        return write_dump(self.calls, str(prefix))


def _plain(row: Any) -> dict[str, Any]:
    return {name: _or_none(value) for name, value in row._asdict().items()}


def _or_none(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value


def report_on(averager: Timed, alone: bool) -> AveragingReport:
    """What `Averager.report` returns."""
    group, times = averager.group, tuple(averager.times)
    now = averager.times_now
    # A step under way tells how long the one before lasted.
    steps = break_down([*times, now] if now is not None and times else times)
    ranks: list[RankTimes] = []
    n_compared = 0
    if not alone:
        told = gather(group, f"{averager.name}, report", steps)
        ranks, n_compared = compare(told)
    return AveragingReport(
        name=str(averager),
        rank=group.rank,
        size=group.size,
        steps=tuple(steps),
        buffers=tuple(_buffers(averager.layout, times)),
        ranks=tuple(ranks),
        n_compared=n_compared,
        missing=tuple(averager.missing()),
        device=averager.device,
        times=(*times, now) if now is not None else times,
        calls=FlightRecord.of(averager),
    )


def _buffers(layout: Layout, times: Sequence[StepTimes]) -> list[BufferTimes]:
    steps = [one for one in times if one.layout is layout]
    return [_buffer(number, layout, steps) for number in range(len(layout.buffers))]


def _buffer(number: int, layout: Layout, steps: Sequence[StepTimes]) -> BufferTimes:
    names = [layout.entries[index].name for index in layout.buffers[number].entries] or [""]
    sent = [one for one in steps if one.posted[number]]

    def mean(values: Sequence[int]) -> float:
        return sum(values) / len(values) / 1e3 if values else 0.0

    def after(of: str) -> float:
        found = [(getattr(one, of)[number], backward_of(one)[0]) for one in sent]
        known = [moment - since for moment, since in found if moment]
        return mean(known) if known or not sent else math.nan

    return BufferTimes(
        number=number,
        n_bytes=layout.buffers[number].extent.n_bytes,
        arrays=(names[0], names[-1]),
        n_sent=len(sent),
        full=after("full"),
        posted=after("posted"),
        done=after("done"),
        waited=mean([one.waits[number][1] - one.waits[number][0] for one in sent]),
    )
