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
        """The column that should meet the goal."""

    def judge(self, medians: Medians, show: Show) -> Verdict:
        """Compare the row's medians, by column; `show` formats a number of the column `ours`."""


@dataclass(frozen=True)
class Faster:
    """The goal that `ours` takes at most 1/`times` of the time of `than`."""

    ours: str
    than: str
    times: float

    def judge(self, medians: Medians, _show: Show) -> Verdict:
        """See Goal."""
        wanted = f">= {self.times:g}"
        return _judge_ratio(medians, self.than, self.ours, wanted, lambda n: n >= self.times)


@dataclass(frozen=True)
class Within:
    """The goal that `ours` takes at most `times` as much as `of`."""

    ours: str
    of: str
    times: float

    def judge(self, medians: Medians, _show: Show) -> Verdict:
        """See Goal."""
        wanted = f"<= {self.times:g}"
        return _judge_ratio(medians, self.ours, self.of, wanted, lambda n: n <= self.times)


@dataclass(frozen=True)
class Near:
    """The goal that `ours` takes from 1/`times` to `times` as much as `of`."""

    ours: str
    of: str
    times: float

    def judge(self, medians: Medians, _show: Show) -> Verdict:
        """See Goal."""
        least = 1 / self.times
        wanted = f"from {least:.2f} to {self.times:g}"
        return _judge_ratio(medians, self.ours, self.of, wanted, lambda n: least <= n <= self.times)


@dataclass(frozen=True)
class Below:
    """The goal that `ours` is at most `bound`, a number in the unit of the column."""

    ours: str
    bound: float

    def judge(self, medians: Medians, show: Show) -> Verdict:
        """See Goal."""
        wanted = f"<= {show(self.bound)}"
        return _judge(self.ours, medians.get(self.ours), show, wanted, lambda n: n <= self.bound)


@dataclass(frozen=True)
class AtLeast:
    """The goal that `ours` is at least `bound`, a number in the unit of the column."""

    ours: str
    bound: float

    def judge(self, medians: Medians, show: Show) -> Verdict:
        """See Goal."""
        wanted = f">= {show(self.bound)}"
        return _judge(self.ours, medians.get(self.ours), show, wanted, lambda n: n >= self.bound)


def _judge_ratio(
    medians: Medians, over: str, under: str, wanted: str, is_met: Callable[[float], bool]
) -> Verdict:
    is_known = over in medians and bool(medians.get(under))
    ratio = medians[over] / medians[under] if is_known else None
    return _judge(f"{over}/{under}", ratio, "{:.2f}".format, wanted, is_met)


def _judge(
    name: str, value: float | None, show: Show, wanted: str, is_met: Callable[[float], bool]
) -> Verdict:
    if value is None:
        return Verdict(f"{name} ? {wanted}", None)
    return Verdict(f"{name} {show(value)} {wanted}", is_met(value))
