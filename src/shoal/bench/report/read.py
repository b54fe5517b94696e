"""The files that `shoal bench --json` writes, checked while they are read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from shoal.errors import UsageError
from shoal.plan.text import counted

FORMAT: Final = "shoal bench"
FORMAT_VERSION: Final = 2


class CallName(NamedTuple):
    """What was called: points of one name belong into one picture."""

    collective: str
    type: str
    redop: str
    root: int
    in_place: bool

    @property
    def title(self) -> str:
        fold = "" if self.redop == "none" else f", {self.redop}"
        root = "" if self.root < 0 else f", root {self.root}"
        way = "in place" if self.in_place else "out of place"
        return f"{self.collective} of {self.type}{fold}{root}, {way}"

    @property
    def stem(self) -> str:
        fold = [] if self.redop == "none" else [self.redop]
        root = [] if self.root < 0 else [f"root{self.root}"]
        way = "in-place" if self.in_place else "out-of-place"
        return "-".join([self.collective, self.type, *fold, *root, way])


@dataclass(frozen=True)
class Measured:
    """One library at one size.

    Args:
        p50_us, p95_us, p99_us: of the calls.
        best_us: the least that the network allows; None where nothing says so.
        bus_bytes_per_s: bus bandwidth of the median call.
        ratio: how many times as long as shoal a peer takes; None where nothing says so.
        n_wrong: elements; None if nothing was checked.
        cpu_us, sent: per call and rank; bytes are None where all ranks share a host.
    """

    size: int
    n_calls: int
    p50_us: float
    p95_us: float
    p99_us: float
    best_us: float | None
    bus_bytes_per_s: float
    ratio: float | None
    n_wrong: int | None
    cpu_us: float
    sent: float | None

    @property
    def share(self) -> float | None:
        """The part of what the network allows that the median call uses."""
        return None if self.best_us is None else self.best_us / self.p50_us


@dataclass(frozen=True)
class BenchRecord:
    """One file, its run (ranks, network, machine, versions and so on), and failures in words.

    `series` has points by call, then by library.
    """

    name: str
    run: Mapping[str, str]
    series: Mapping[CallName, Mapping[str, Sequence[Measured]]]
    failures: Sequence[str]


def read_records(paths: Sequence[Path]) -> list[BenchRecord]:
    """Read all files, under names that differ; UsageError if one is unreadable or no record."""
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        names = [str(path.with_suffix("")) for path in paths]
    if len(set(names)) < len(names):
        raise UsageError("a file is named twice: " + ", ".join(map(str, paths)))
    return [_read(path, name) for path, name in zip(paths, names, strict=True)]


def _read(path: Path, name: str) -> BenchRecord:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"cannot read {path}: {reason}") from None
    if not text.strip():
        raise UsageError(f"{path} is empty: the run that was to write it has not ended, or failed")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from None
    part = _part_of_shoal(path, data)
    try:
        record = _record(name, part)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is damaged: {what}; measure again") from None
    if not record.series:
        why = "; ".join(record.failures) or "what was called has no size"
        raise UsageError(f"{path} has nothing to draw: {why}")
    return record


def _part_of_shoal(path: Path, data: Any) -> Mapping[str, Any]:
    part = data.get("shoal") if isinstance(data, dict) else None
    if not isinstance(part, dict) or part.get("format") != FORMAT:
        raise UsageError(f"{path} is not what `shoal bench --json FILE` writes")
    version = part.get("format_version")
    if version != FORMAT_VERSION:
        raise UsageError(
            f"{path} has format {version} of shoal {part.get('version')}, and this shoal reads "
            f"format {FORMAT_VERSION}: read it with that version, or measure again"
        )
    if not part.get("points"):
        raise UsageError(f"{path} has no measurements: no size fitted, see the run's own output")
    return part


def _record(name: str, part: Mapping[str, Any]) -> BenchRecord:
    series: dict[CallName, dict[str, list[Measured]]] = {}
    failures: dict[str, None] = {}
    place = part["place"]
    for point in part["points"]:
        best_us = _maybe(point["least_us"])
        for one in point["libraries"]:
            if "failure" in one:
                what = f"{one['library']}, {point['collective']}: {one['failure']}"
                failures[what] = None
                continue
            collective, kind, redop = (str(point[key]) for key in ("collective", "type", "redop"))
            call = CallName(collective, kind, redop, int(point["root"]), bool(one["in_place"]))
            measured = _measured(int(point["size"]), best_us, one)
            if measured.size and measured.p50_us > 0:
                series.setdefault(call, {}).setdefault(str(one["library"]), []).append(measured)
    where = {"ranks": _place_text(place), "network": _network_text(place)}
    facts = where | {str(key): str(value) for key, value in part["run"].items()}
    return BenchRecord(name, facts, series, list(failures))


def _measured(size: int, best_us: float | None, one: Mapping[str, Any]) -> Measured:
    calls = one["per_iter"]
    p50_us, mean_us = _number(calls["p50_us"]), _number(one["time"])
    bus = _number(one["bus_bw"]) * 1e9 * (mean_us / p50_us if p50_us else 0.0)
    return Measured(
        size=size,
        n_calls=len(calls["times_us"]),
        p50_us=p50_us,
        p95_us=_number(calls["p95_us"]),
        p99_us=_number(calls["p99_us"]),
        best_us=best_us,
        bus_bytes_per_s=bus,
        ratio=_maybe(one["ratio"]),
        n_wrong=None if one["nwrong"] is None else int(one["nwrong"]),
        cpu_us=_number(one["cpu_us_per_rank"]),
        sent=_maybe(one["sent_bytes_per_rank"]),
    )


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no number to draw")
    return number


def _maybe(value: Any) -> float | None:
    return None if value is None else _number(value)


def _network_text(place: Mapping[str, Any]) -> str:
    if not place["n_hosts"]:
        return ""
    rate = place["rate_mbit"]
    return "NICs that nothing shapes" if rate is None else f"NICs at {float(rate):g} Mbit/s"


def _place_text(place: Mapping[str, Any]) -> str:
    n_ranks, n_hosts = int(place["n_ranks"]), int(place["n_hosts"])
    return counted(n_ranks, "rank") + (f" on {n_hosts} hosts of a lab" if n_hosts else "")
