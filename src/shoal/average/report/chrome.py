"""Writes steps as a trace in Chrome's format, for Perfetto, on the clock of torch's profiler.

torch writes microseconds since `baseTimeNanoseconds`, in Unix time: the begin of a quarter of a
year (Kineto's ChromeTraceBaseTime). shoal uses the same base, so traces of both agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from shoal.average.report.breakdown import backward_of, forward_of, waits_of

if TYPE_CHECKING:
    from shoal.average.report.breakdown import Interval
    from shoal.average.step_times import StepTimes

_QUARTER_NS: Final = 7_889_238 * 10**9

# Rows of a process; torch numbers its rows by threads.
_PASSES, _WAITS, _FIRST_LANE = 0, 1, 2


def trace_of(steps: Sequence[StepTimes], rank: int) -> dict[str, Any]:
    """Return the trace of one rank, as a process with rows of passes, waits and buffers."""
    base = (steps[-1].end or steps[-1].begin) + steps[-1].to_unix if steps else 0
    base -= base % _QUARTER_NS
    events = [event for times in steps for event in _events(times, base)]
    n_rows = max((event["tid"] for event in events), default=0) + 1
    names = {_PASSES: "shoal: passes", _WAITS: "shoal: waits"}
    labels = [_label("process_name", 0, name=f"rank {rank}")]
    for row in range(n_rows):
        labels.append(_label("thread_name", row, name=names.get(row, "shoal: buffers")))
        labels.append(_label("thread_sort_index", row, sort_index=row))
    for event in (*labels, *events):
        event["pid"] = rank
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "distributedInfo": {"rank": rank, "backend": "shoal"},
        "baseTimeNanoseconds": base,
        "traceEvents": [*labels, *events],
    }


def _label(kind: str, row: int, **value: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "tid": row, "args": value}


def _events(times: StepTimes, base: int) -> Iterator[dict[str, Any]]:
    def event(name: str, row: int, when: Interval, **args: Any) -> dict[str, Any]:
        begin, end = when
        return {
            "ph": "X",
            "cat": "shoal",
            "name": name,
            "tid": row,
            "ts": (begin + times.to_unix - base) / 1e3,
            "dur": (end - begin) / 1e3,
            "args": {"step": times.number, **args},
        }

    for name, when in (("forward", forward_of(times)), ("backward", backward_of(times))):
        if when[1] > when[0]:
            yield event(name, _PASSES, when)
    for when in waits_of(times):
        yield event("wait for averages", _WAITS, when)
    for lane, number in _lanes(times):
        buffer = times.layout.buffers[number]
        arrays = [times.layout.entries[index].name for index in buffer.entries]
        posted = times.posted[number]
        yield event(
            f"buffer {number}",
            _FIRST_LANE + lane,
            (posted, times.done[number]),
            n_bytes=buffer.extent.n_bytes,
            arrays=arrays[:3] + ["..."] * (len(arrays) > 3),
            # 0 for a buffer sent at the end of the step before it was full.
            full_us_before=(posted - (times.full[number] or posted)) / 1e3,
        )


def _lanes(times: StepTimes) -> Iterator[tuple[int, int]]:
    """Assign each averaged buffer a row without another buffer in flight at the same time."""
    free_at: list[int] = []
    numbers = [number for number, done in enumerate(times.done) if done and times.posted[number]]
    for number in sorted(numbers, key=times.posted.__getitem__):
        posted, done = times.posted[number], times.done[number]
        lane = next((row for row, free in enumerate(free_at) if free <= posted), len(free_at))
        free_at[lane:] = [done, *free_at[lane + 1 :]]
        yield lane, number
