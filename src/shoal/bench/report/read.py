"""The files that `shoal bench --json` writes, checked while they are read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from shoal.errors import UsageError

FORMAT: Final = "shoal bench"
FORMAT_VERSION: Final = 1


class CallName(NamedTuple):
    """What was called: points of one name belong into one picture."""

    collective: str
    type: str
    redop: str
    root: int
    in_place: bool

    @property
    def title(self) -> str:
        """For people."""
        fold = "" if self.redop == "none" else f", {self.redop}"
        root = "" if self.root < 0 else f", root {self.root}"
        way = "in place" if self.in_place else "out of place"
        return f"{self.collective} of {self.type}{fold}{root}, {way}"

    @property
    def stem(self) -> str:
        """For the names of files."""
        fold = [] if self.redop == "none" else [self.redop]
        root = [] if self.root < 0 else [f"root{self.root}"]
        way = "in-place" if self.in_place else "out-of-place"
        return "-".join([self.collective, self.type, *fold, *root, way])


@dataclass(frozen=True)
class Measured:
    """One library at one size.

    Args:
        p50_us, p95_us, p99_us: of the calls.
        bus_bytes_per_s: bus bandwidth of the median call.
        ratio: how many times as long as shoal a peer takes; None where nothing says so.
        n_wrong: elements; None if nothing was checked.
        cpu_us, sent, received: per call and rank; bytes are None where all ranks share a host.
    """

    size: int
    n_calls: int
    p50_us: float
    p95_us: float
    p99_us: float
    bus_bytes_per_s: float
    ratio: float | None
    n_wrong: int | None
    cpu_us: float
    sent: float | None
    received: float | None


class BestCase(NamedTuple):
    """What the network allows at one size."""

    size: int
    time_us: float
    bus_bytes_per_s: float


@dataclass(frozen=True)
class BenchRecord:
    """One file.

    Args:
        name: of the file, for legends.
        run: date, machine, versions, commit and command.
        place: in words.
        network: in words what the limit is; empty if there is none.
        series: by call, then by library: points by size.
        limits: by call.
        failures: why a library has no number.
    """

    name: str
    run: Mapping[str, str]
    place: str
    network: str
    n_rounds: int
    series: Mapping[CallName, Mapping[str, Sequence[Measured]]]
    limits: Mapping[CallName, Sequence[BestCase]]
    failures: Sequence[str]


def read_records(paths: Sequence[Path]) -> list[BenchRecord]:
    """All files, under names that tell them apart.

    Raises:
        UsageError: one cannot be read, or is none of `shoal bench`, or of another version.
    """
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
    told = _told_by_shoal(path, data)
    try:
        record = _record(name, told)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is damaged: {what}; measure again") from None
    if not record.series:
        why = "; ".join(record.failures) or "what was called has no size"
        raise UsageError(f"{path} has nothing to draw: {why}")
    return record


def _told_by_shoal(path: Path, data: Any) -> Mapping[str, Any]:
    told = data.get("shoal") if isinstance(data, dict) else None
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise UsageError(f"{path} is not what `shoal bench --json FILE` writes")
    version = told.get("format_version")
    if version != FORMAT_VERSION:
        raise UsageError(
            f"{path} has format {version} of shoal {told.get('version')}, and this shoal reads "
            f"format {FORMAT_VERSION}: read it with that version, or measure again"
        )
    if not told.get("points"):
        raise UsageError(f"{path} has no measurements: no size fitted, see the run's own output")
    return told


def _record(name: str, told: Mapping[str, Any]) -> BenchRecord:
    series: dict[CallName, dict[str, list[Measured]]] = {}
    limits: dict[CallName, list[BestCase]] = {}
    failures: dict[str, None] = {}
    rate = _rate_of(told["place"])
    for point in told["points"]:
        for one in point["libraries"]:
            if "failure" in one:
                what = f"{one['library']}, {point['collective']}: {one['failure']}"
                failures[what] = None
                continue
            call = _call_of(point, bool(one["in_place"]))
            measured = _measured(int(point["size"]), one)
            if measured.size and measured.p50_us > 0:
                series.setdefault(call, {}).setdefault(str(one["library"]), []).append(measured)
        for call in _calls_of(point):
            limits.setdefault(call, []).extend(_best(point, rate))
    return BenchRecord(
        name,
        {str(key): str(value) for key, value in told["run"].items()},
        _place_text(told["place"]),
        _network_text(told["place"]) if rate else "",
        int(told["n_rounds"]),
        series,
        limits,
        list(failures),
    )


def _call_of(point: Mapping[str, Any], in_place: bool) -> CallName:
    collective, kind, redop = (str(point[key]) for key in ("collective", "type", "redop"))
    return CallName(collective, kind, redop, int(point["root"]), in_place)


def _calls_of(point: Mapping[str, Any]) -> Iterator[CallName]:
    for in_place in dict.fromkeys(bool(one["in_place"]) for one in point["libraries"]):
        yield _call_of(point, in_place)


def _measured(size: int, one: Mapping[str, Any]) -> Measured:
    calls = one["per_iter"]
    p50_us, mean_us = _number(calls["p50_us"]), _number(one["time"])
    bus = _number(one["bus_bw"]) * 1e9 * (mean_us / p50_us if p50_us else 0.0)
    return Measured(
        size=size,
        n_calls=len(calls["times_us"]),
        p50_us=p50_us,
        p95_us=_number(calls["p95_us"]),
        p99_us=_number(calls["p99_us"]),
        bus_bytes_per_s=bus,
        ratio=_maybe(one["ratio"]),
        n_wrong=None if one["nwrong"] is None else int(one["nwrong"]),
        cpu_us=_number(one["cpu_us_per_rank"]),
        sent=_maybe(one["sent_bytes_per_rank"]),
        received=_maybe(one["received_bytes_per_rank"]),
    )


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no number to draw")
    return number


def _maybe(value: Any) -> float | None:
    return None if value is None else _number(value)


def _best(point: Mapping[str, Any], rate: float | None) -> Iterator[BestCase]:
    crossing, factors = point["crossing_bytes"], _bus_factors(point)
    if rate and crossing and factors:
        time_s = _number(crossing) / rate
        yield BestCase(int(point["size"]), time_s * 1e6, factors[0] * int(point["size"]) / time_s)


def _bus_factors(point: Mapping[str, Any]) -> list[float]:
    return [
        float(one["bus_bw"]) / float(one["alg_bw"])
        for one in point["libraries"]
        if one.get("alg_bw")
    ]


def _rate_of(place: Mapping[str, Any]) -> float | None:
    """Bytes per second: of the raw streams, else what NICs are shaped to."""
    raw = [_number(one) for one in place["raw_bytes_per_s"]]
    if raw:
        return sum(raw) / len(raw)
    return None if place["rate_mbit"] is None else float(place["rate_mbit"]) * 1e6 / 8


def _network_text(place: Mapping[str, Any]) -> str:
    raw = [float(one) * 8 / 1e6 for one in place["raw_bytes_per_s"]]
    rate = place["rate_mbit"]
    shaped = "NICs that nothing shapes" if rate is None else f"NICs at {float(rate):g} Mbit/s"
    streams = " and ".join(f"{one:.0f}" for one in raw)
    told = f"; raw TCP streams in a ring reached {streams} Mbit/s in this run" if raw else ""
    return shaped + told


def _place_text(place: Mapping[str, Any]) -> str:
    n_ranks, n_hosts = int(place["n_ranks"]), int(place["n_hosts"])
    ranks = f"{n_ranks} rank{'s' * (n_ranks != 1)}"
    return f"{ranks} on {n_hosts} hosts of a lab" if n_hosts else ranks
