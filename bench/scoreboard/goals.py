"""Goals: bounds for the numbers of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

Medians = Mapping[str, float]
Show = Callable[[float], str]


@dataclass(frozen=True)
class Verdict:
    """The comparison as text, and whether the goal is met; None if a number is missing."""

    text: str
    is_met: bool | None

    def __str__(self) -> str:
        words = {True: "met", False: "MISSED", None: "not measured"}
        return f"{self.text} {words[self.is_met]}"


class Goal(Protocol):
    """A goal that a row of a table can meet or miss."""

    @property
    def ours(self) -> str:
        """The column that should meet it."""

    def judge(self, medians: Medians, show: Show) -> Verdict:
        """Compare the row's medians, by column; `show` formats a number of the column `ours`."""


@dataclass(frozen=True)
class Faster:
    """`ours` takes at most 1/`times` of the time of `than`."""

    ours: str
    than: str
    times: float

    def judge(self, medians: Medians, _show: Show) -> Verdict:
        """See Goal."""
        ratio = _ratio(medians, self.than, self.ours)
        is_met = None if ratio is None else ratio >= self.times
        return _ratio_verdict(f"{self.than}/{self.ours}", ratio, f">= {self.times:g}", is_met)


@dataclass(frozen=True)
class Within:
    """`ours` takes at most `times` as much as `of`."""

    ours: str
    of: str
    times: float

    def judge(self, medians: Medians, _show: Show) -> Verdict:
        """See Goal."""
        ratio = _ratio(medians, self.ours, self.of)
        is_met = None if ratio is None else ratio <= self.times
        return _ratio_verdict(f"{self.ours}/{self.of}", ratio, f"<= {self.times:g}", is_met)


@dataclass(frozen=True)
class Near:
    """`ours` takes at most `times` as much as `of`, and at least that part of it."""

    ours: str
    of: str
    times: float

    def judge(self, medians: Medians, _show: Show) -> Verdict:
        """See Goal."""
        ratio = _ratio(medians, self.ours, self.of)
        is_met = None if ratio is None else 1 / self.times <= ratio <= self.times
        bounds = f"from {1 / self.times:.2f} to {self.times:g}"
        return _ratio_verdict(f"{self.ours}/{self.of}", ratio, bounds, is_met)


@dataclass(frozen=True)
class Below:
    """`ours` is at most `bound`, a number in the unit of the table."""

    ours: str
    bound: float

    def judge(self, medians: Medians, show: Show) -> Verdict:
        """See Goal."""
        value = medians.get(self.ours)
        shown = "?" if value is None else show(value)
        is_met = None if value is None else value <= self.bound
        return Verdict(f"{self.ours} {shown} <= {show(self.bound)}", is_met)


@dataclass(frozen=True)
class AtLeast:
    """`ours` is at least `bound`, a number in the unit of the column."""

    ours: str
    bound: float

    def judge(self, medians: Medians, show: Show) -> Verdict:
        """See Goal."""
        value = medians.get(self.ours)
        shown = "?" if value is None else show(value)
        is_met = None if value is None else value >= self.bound
        return Verdict(f"{self.ours} {shown} >= {show(self.bound)}", is_met)


def _ratio(medians: Medians, over: str, under: str) -> float | None:
    if over not in medians or not medians.get(under):
        return None
    return medians[over] / medians[under]


def _ratio_verdict(name: str, ratio: float | None, wanted: str, is_met: bool | None) -> Verdict:
    shown = "?" if ratio is None else f"{ratio:.2f}"
    return Verdict(f"{name} {shown} {wanted}", is_met)
