"""The file of a run: `shoal bench --json` writes it, and `shoal report` reads and checks it.

A change of its fields changes `FORMAT_VERSION`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import shoal
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.bench.measured import Figures, SizePoint

FORMAT: Final = "shoal bench"
FORMAT_VERSION: Final = 3


class CallName(NamedTuple):
    """The kind of a call: one picture shows all points of the same name."""

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


class Measured(NamedTuple):
    """One library at one size.

    Args:
        size: bytes, as `shoal bench` counts them.
        p50_us, p95_us, p99_us: percentiles of the calls.
        bus_bytes_per_s: the bus bandwidth of the median call.
        cpu_us: CPU time per call and rank.
        least_us: the least time that the network allows; None: unknown.
        ratio: the peer's time over shoal's; None: not compared.
        n_wrong: wrong elements; None: nothing was checked.
        sent_bytes: bytes over NICs per call and rank; None: all ranks share a host.
    """

    size: int
    n_calls: int
    p50_us: float
    p95_us: float
    p99_us: float
    bus_bytes_per_s: float
    cpu_us: float
    least_us: float | None
    ratio: float | None
    n_wrong: int | None
    sent_bytes: float | None

    @property
    def share(self) -> float | None:
        """The share of the network's limit that the median call reaches."""
        return None if self.least_us is None else self.least_us / self.p50_us


_N_REQUIRED: Final = Measured._fields.index("least_us")
"""The number of fields that are never None; they come first."""


class BenchRecord(NamedTuple):
    """One file: its name, the facts of its run, its points, and the failures as text.

    `series` has points by call, then by library.
    """

    name: str
    run: Mapping[str, str]
    series: Mapping[CallName, Mapping[str, Sequence[Measured]]]
    failures: Sequence[str]


def write_record(path: Path, run: Mapping[str, str], points: Sequence[SizePoint]) -> None:
    """Write a run; replaces an existing file. UsageError if that fails."""
    record = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "version": shoal.__version__,
        "run": run,
        "points": [_entry(point, one) for point in points for one in point.figures],
    }
    try:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the results to {path}: {error.strerror}") from None


def _entry(point: SizePoint, one: Figures) -> dict[str, Any]:
    kind = point.kind
    call = CallName(kind.collective, kind.element.nccl, kind.redop, kind.root, one.in_place)
    entry = {"library": one.library, **call._asdict(), "size": point.n_bytes, "count": point.count}
    if one.failure:
        return entry | {"failure": one.failure}
    times = one.times
    measured = Measured(
        size=point.n_bytes,
        n_calls=len(one.times_s),
        p50_us=times.p50 * 1e6,
        p95_us=times.p95 * 1e6,
        p99_us=times.p99 * 1e6,
        bus_bytes_per_s=one.bus * one.n_bytes / times.p50 if times.p50 else 0.0,
        cpu_us=statistics.fmean(one.cpu_s) * 1e6,
        least_us=None if point.least_s is None else point.least_s * 1e6,
        ratio=point.ratio(one),
        n_wrong=one.n_wrong,
        sent_bytes=statistics.fmean(one.sent) if one.sent else None,
    )
    received = statistics.fmean(one.received) if one.received else None
    times_us = [time_s * 1e6 for time_s in one.times_s]
    return entry | measured._asdict() | {"received_bytes": received, "times_us": times_us}


def read_records(paths: Sequence[Path]) -> list[BenchRecord]:
    """Read all files, under names that differ.

    Raises:
        UsageError: a file is named twice, cannot be read, is damaged, or is not such a record.
    """
    names = [path.stem for path in paths]
    if len(set(names)) < len(names):
        names = [str(path.with_suffix("")) for path in paths]
    if len(set(names)) < len(names):
        raise UsageError("a file is named twice: " + ", ".join(map(str, paths)))
    return [_read(path, name) for path, name in zip(paths, names, strict=True)]


def _read(path: Path, name: str) -> BenchRecord:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON ({error}): has the run ended?") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UsageError(f"{path} is not a file of `shoal bench --json FILE`")
    if (version := data.get("format_version")) != FORMAT_VERSION:
        raise UsageError(
            f"{path} has format {version} of shoal {data.get('version')}, but this shoal reads "
            f"format {FORMAT_VERSION}: read it with that version, or measure again"
        )
    try:
        record = _record(name, data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(f"{path} is damaged: {what}; measure again") from None
    if not record.series:
        why = "; ".join(record.failures) or "no size was measured, see the run's own output"
        raise UsageError(f"{path} has nothing to draw: {why}")
    return record


def _record(name: str, data: Mapping[str, Any]) -> BenchRecord:
    series: dict[CallName, dict[str, list[Measured]]] = {}
    for point in data["points"]:
        if "failure" not in point:
            call = CallName(*(point[field] for field in CallName._fields))
            measured = Measured(*(point[field] for field in Measured._fields))
            _check(measured)
            if measured.size and measured.p50_us > 0:
                series.setdefault(call, {}).setdefault(str(point["library"]), []).append(measured)
    facts = {str(key): str(value) for key, value in data["run"].items()}
    return BenchRecord(name, facts, series, list(dict.fromkeys(_failures(data["points"]))))


def _check(measured: Measured) -> None:
    """Raise TypeError or ValueError if a field is not a finite number."""
    for place, (field, value) in enumerate(measured._asdict().items()):
        is_absent = value is None and place >= _N_REQUIRED
        if not is_absent and not math.isfinite(value):
            raise ValueError(f"{field} is {value}")


def _failures(points: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for point in points:
        if "failure" in point:
            yield f"{point['library']}, {point['collective']}: {point['failure']}"
