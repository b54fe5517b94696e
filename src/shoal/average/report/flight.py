"""The averaging calls of a rank in the format of torch's flight recorder, for its analyzer.

Calls are numbered alike on every rank: by the buffers of all steps before. So a dump that begins
later than another's, and buffers that left in another order, are matched rightly, and a call that
one rank has missed is missing there.

Source: torch/csrc/distributed/c10d/FlightRecorder.hpp of torch 2.13, and the analyzer in its
torch.distributed.flight_recorder.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shoal import threads
from shoal.dtypes import DType
from shoal.errors import ShoalError
from shoal.settings import NO

if TYPE_CHECKING:
    from shoal.average.averager import Averager
    from shoal.average.layout import FusionBuffer
    from shoal.average.report.report import Timed
    from shoal.average.step_times import StepTimes

_LOG: Final = logging.getLogger("shoal")

_VERSION: Final = "2.10"
# NOT "shoal": the analyzer refuses libraries that it does not know.
_LIBRARY: Final = "gloo"

# torch's names: where its own recorder writes, the older one last; and whether it does by itself.
_PREFIXES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_ON_TIMEOUT: Final = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")

# A network file system may hang with everything else. The writer goes on by itself then.
_PATIENCE_S: Final = 5.0

_TORCH_NAMES: Final[Mapping[DType, str]] = {
    DType.FLOAT32: "Float",
    DType.FLOAT64: "Double",
    DType.FLOAT16: "Half",
    DType.BFLOAT16: "BFloat16",
    DType.INT8: "Char",
    DType.INT16: "Short",
    DType.INT32: "Int",
    DType.INT64: "Long",
    DType.UINT8: "Byte",
    DType.BOOL: "Bool",
    DType.COMPLEX64: "ComplexFloat",
    DType.COMPLEX128: "ComplexDouble",
    DType.UINT16: "UInt16",
    DType.UINT32: "UInt32",
    DType.UINT64: "UInt64",
}


class FlightRecord(NamedTuple):
    """The calls of one averager on one rank, of the last steps.

    Args:
        name: of the averager.
        group: the name of its group.
        rank: of this process.
        members: the ranks of the group.
        missing: the arrays that have not become ready in the step under way.
    """

    name: str
    group: str
    rank: int
    members: tuple[int, ...]
    timeout_s: float
    missing: tuple[str, ...]
    times: tuple[StepTimes, ...]

    @classmethod
    def of(cls, averager: Timed) -> FlightRecord:
        """Those until now."""
        group, now = averager.group, averager.times_now
        times = (*averager.times, now) if now is not None else tuple(averager.times)
        return cls(
            averager.name,
            group.name,
            group.members[group.rank],
            group.members,
            group.timeout_s,
            tuple(averager.missing()),
            times,
        )


def dump_of(calls: FlightRecord) -> dict[str, Any]:
    """What torch's recorder would pickle; and under "never_ready" what kept calls from leaving."""
    entries = [entry for times in calls.times for entry in _entries(calls, times)]
    ended = [one["collective_seq_id"] for one in entries if one["state"] == "completed"]
    left = [one["collective_seq_id"] for one in entries]
    group = {"name": calls.name, "desc": _text(calls), "ranks": str(list(calls.members))}
    status = {
        "last_enqueued_collective": max(left, default=-1),
        "last_started_collective": max(left, default=-1),
        "last_completed_collective": max(ended, default=-1),
    }
    return {
        "version": _VERSION,
        "pg_config": {calls.name: group},
        "pg_status": {calls.name: status},
        "comm_lib_version": "shoal",
        "entries": entries,
        "never_ready": list(calls.missing),
    }


def _text(calls: FlightRecord) -> str:
    return f"shoal group {calls.group}"


def _entries(calls: FlightRecord, times: StepTimes) -> Iterator[dict[str, Any]]:
    for number, buffer in enumerate(times.layout.buffers):
        if times.posted[number]:
            yield _entry(calls, times, number, buffer)


def _entry(
    calls: FlightRecord, times: StepTimes, number: int, buffer: FusionBuffer
) -> dict[str, Any]:
    sequence = times.first_call + number + 1
    posted, done = times.posted[number], times.done[number]
    shape, kind = [[buffer.n_elems]], [_TORCH_NAMES[buffer.dtype]]
    return {
        "record_id": sequence,
        "pg_id": 0,
        "process_group": (calls.name, _text(calls)),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "op_id": sequence,
        "profiling_name": f"{_LIBRARY}:all_reduce",
        "time_created_ns": posted + times.to_unix,
        "time_discovered_started_ns": posted + times.to_unix,
        "time_discovered_completed_ns": done + times.to_unix if done else None,
        **({"duration_ms": (done - posted) / 1e6} if done else {}),
        "input_sizes": shape,
        "input_dtypes": kind,
        "output_sizes": shape,
        "output_dtypes": kind,
        "state": "completed" if done else "started",
        "retired": bool(done),
        "timeout_ms": int(calls.timeout_s * 1e3),
        "is_p2p": False,
        "frames": [],
        "thread_id": "",
        "thread_name": "",
    }


def write_dump(calls: FlightRecord, prefix: str) -> Path:
    """Write a dump to the file of this prefix and the rank; whole, or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(f"{prefix}{calls.rank}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # NOT beside it under the same prefix: the analyzer reads all files that begin with it.
    part = path.parent / f".shoal-{os.getpid()}-{calls.rank}.part"
    try:
        with open(part, "wb", opener=_for_me_alone) as file:
            pickle.dump(dump_of(calls), file)
        part.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    return path


def _for_me_alone(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def prefix_of_job(environ: Mapping[str, str]) -> str | None:
    """Where a rank writes when its group has ended; None: nowhere."""
    if _first(environ, _ON_TIMEOUT).lower() in NO:
        return None
    return _first(environ, _PREFIXES) or None


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


class FlightDump:
    """Writes an averager's calls where the job wants them. Has no hold on the averager."""

    def __init__(self, averager: Averager) -> None:
        self._averager = weakref.ref(averager)
        self._is_written = False

    def __call__(self, *, again: bool = False) -> None:
        """A step has failed; what fails here is logged.

        Args:
            again: also if it was called before: that may not have been the end of the group.
        """
        averager, prefix = self._averager(), prefix_of_job(os.environ)
        if averager is None or prefix is None or (self._is_written and not again):
            return
        self._is_written = True
        _write_in_time(FlightRecord.of(averager), prefix)


def _write_in_time(calls: FlightRecord, prefix: str) -> None:
    def work() -> None:
        try:
            _LOG.warning("%s: its last calls are in %s", calls.name, write_dump(calls, prefix))
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
            _LOG.warning("the calls of rank %d cannot be written: %s", calls.rank, error)

    try:
        writer = threads.start("shoal-flight-writer", work)
    except ShoalError as error:
        _LOG.warning("the calls of rank %d cannot be written: %s", calls.rank, error)
        return
    writer.join(_PATIENCE_S)
    if writer.is_alive():
        _LOG.warning("%s%d takes longer than %g s to write", prefix, calls.rank, _PATIENCE_S)
