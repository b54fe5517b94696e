"""A run as JSON: the keys of nccl-tests, and under the key `shoal` all other numbers.

`shoal report` reads the part under that key (report/read.py); a change there changes
`FORMAT_VERSION`.
"""

from __future__ import annotations

import datetime as dt
import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import shoal
from shoal.bench.report.read import FORMAT, FORMAT_VERSION

if TYPE_CHECKING:
    from shoal.bench.measured import Figures, SizePoint
    from shoal.bench.sweep import Sweep

_NCCL_TESTS_VERSION: Final = 2  # of its JSON
_TIME: Final = "%Y-%m-%d %H:%M:%S"


def now() -> str:
    """Return the time as nccl-tests writes it."""
    return dt.datetime.now().astimezone().strftime(_TIME)


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a run, in place of what is there."""
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def record_of(
    sweep: Sweep,
    run: Mapping[str, str],
    ranks: Sequence[Mapping[str, Any]],
    points: Sequence[SizePoint],
    start_time: str,
) -> dict[str, Any]:
    """Return all of a run."""
    n_wrong = sum(bool(point.n_wrong) for point in points)
    ours = [way for p in points for flag in (False, True) if (way := p.ours(flag))]
    mean = statistics.fmean(way.bus_gb_s for way in ours) if ours else 0.0
    failures = dict.fromkeys(
        f"{one.library}: {one.failure}" for point in points for one in point.figures if one.failure
    )
    return {
        "version": _NCCL_TESTS_VERSION,
        "start_time": start_time,
        "args": shlex.split(run["command"]),
        "config": _config(sweep, ranks),
        "results": [_result(point) for point in points],
        "out_of_bounds": {"count": n_wrong, "okay": _truth(n_wrong == 0)},
        "average_bus_bandwidth": {"bandwidth": mean, "okay": "unchecked"},
        "errors": list(failures),
        "end_time": now(),
        "shoal": {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "version": shoal.__version__,
            "run": dict(run),
            "place": {
                "n_ranks": sweep.place.n_ranks,
                "n_hosts": sweep.place.n_hosts,
                "rate_mbit": sweep.place.rate_mbit,
            },
            "n_rounds": sweep.n_rounds,
            "through": "torch.distributed" if sweep.library == "shoal" else "NumPy",
            "points": [_point(point) for point in points],
        },
    }


def _config(sweep: Sweep, ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    sizes = sweep.sizes
    step = {"step_factor": sizes.factor} if sizes.factor > 1 else {"step_bytes": sizes.step}
    return {
        "nthreads": 1,
        "ngpus": 1,
        "minimum_bytes": sizes.least,
        "maximum_bytes": sizes.most,
        **step,
        "warmup_iters": sweep.n_warmup,
        "iterations": sweep.n_calls,
        "aggregated_iterations": 1,
        "validation": sweep.n_checks,
        "graph": 0,
        "blocking_collectives": _truth(sweep.is_apart),
        "per_iter_timing": _truth(True),
        "parallel_init": _truth(False),
        "devices": [
            {
                "rank": rank,
                "group": 0,
                "pid": who["pid"],
                "hostname": who["host"],
                "device": rank,
                "device_hex": "",
                "device_info": "CPU",
            }
            for rank, who in enumerate(ranks)
        ],
    }


def _result(point: SizePoint) -> dict[str, Any]:
    kind = point.kind
    entry: dict[str, Any] = {
        "size": point.n_bytes,
        "count": point.count,
        "type": kind.element.nccl,
        "redop": kind.redop,
        "root": str(kind.root),
    }
    for name, in_place in (("out_of_place", False), ("in_place", True)):
        way = point.ours(in_place)
        entry[name] = _figures(way) if way else None
        if way:
            entry[f"{name}_per_iter"] = _per_call(way)
    n_calls = len(point.figures[0].times_s)
    return entry | {"actual_iterations": n_calls, "experiment_name": kind.experiment}


def _figures(way: Figures) -> dict[str, Any]:
    return {
        "time": way.times.avg * 1e6,
        "alg_bw": way.alg_gb_s,
        "bus_bw": way.bus_gb_s,
        "nwrong": way.n_wrong,
    }


def _per_call(way: Figures) -> dict[str, Any]:
    entry = {f"{name}_us": value * 1e6 for name, value in way.times._asdict().items()}
    return entry | {"cv_pct": way.times.cv_pct, "times_us": [one * 1e6 for one in way.times_s]}


def _point(point: SizePoint) -> dict[str, Any]:
    kind = point.kind
    return {
        "collective": kind.collective,
        "type": kind.element.nccl,
        "redop": kind.redop,
        "root": kind.root,
        "size": point.n_bytes,
        "count": point.count,
        "least_us": None if point.least_s is None else point.least_s * 1e6,
        "libraries": [_library(point, one) for one in point.figures],
    }


def _library(point: SizePoint, one: Figures) -> dict[str, Any]:
    entry: dict[str, Any] = {"library": one.library, "in_place": one.in_place}
    if one.failure:
        return entry | {"failure": one.failure}
    return entry | {
        **_figures(one),
        "ratio": point.ratio(one),
        "cpu_us_per_rank": statistics.fmean(one.cpu_s) * 1e6,
        "sent_bytes_per_rank": statistics.fmean(one.sent) if one.sent else None,
        "received_bytes_per_rank": statistics.fmean(one.received) if one.received else None,
        "per_iter": _per_call(one),
    }


def _truth(is_so: bool) -> str:
    return "true" if is_so else "false"
