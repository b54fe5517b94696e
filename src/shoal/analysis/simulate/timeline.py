"""Records the activity of each NIC over time in a simulation, and the causes of idle time."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final, NamedTuple

from shoal.analysis.simulate.events import EventSimulation
from shoal.schedule import Recv

BUSY: Final = "busy"
DATA: Final = "data"
GRANT: Final = "grant"
CORES: Final = "cores"
OVER: Final = "over"

Span = tuple[float, float, str]
"""Begin and end in microseconds, and the NIC's activity."""


class Timeline(NamedTuple):
    """The sends, receives and waits of each host's NIC in a run.

    `time_us` is the time of the run, which is shorter than the simulation if long chunks were cut.
    """

    time_us: float
    out: dict[int, list[Span]]
    into: dict[int, list[Span]]


class Recorder(EventSimulation):
    """A simulation that records the activity of its NICs.

    A NIC is idle until a core has the next segment ready. The last event that this segment waited
    for, through all steps before it on this rank or host, was data or a grant from another host;
    since then its host's cores have worked on it.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._spans_out: dict[int, list[Span]] = defaultdict(list)
        self._spans_into: dict[int, list[Span]] = defaultdict(list)
        self._blocker: dict[int, int | str] = {}  # the step or the event that a step waits for
        self._came = [(0.0, CORES)] * len(self._flow.steps)  # the last event before each step

    def timeline(self) -> Timeline:
        """Return the activity of the NICs in the ended run."""
        for spans in self._spans_out.values():
            _extend(spans, self._now, OVER)
        return Timeline(self._now, self._spans_out, self._spans_into)

    def _attempt(self, step: int) -> None:
        segment = self._begun[step]
        super()._attempt(step)
        if self._begun[step] > segment:
            blocker = self._blocker.pop(step, CORES)
            came = self._came[blocker] if isinstance(blocker, int) else (self._now, blocker)
            self._came[step] = came
        elif not self._is_busy[step] and segment < self._n_segments[step]:
            self._blocker[step] = self._find_blocker(step, segment)

    def _find_blocker(self, step: int, segment: int) -> int | str:
        """Return the first condition that `_attempt` found unmet."""
        done = self._done
        for earlier in self._flow.waits_for[step]:
            if done[earlier] <= segment and done[earlier] < self._n_segments[earlier]:
                return earlier
        if isinstance(self._flow.steps[step], Recv):
            send = self._flow.partner_of[step]
            return DATA if self._is_wire[send] else send
        return GRANT if self._granted[step] <= segment else self._gate[step]

    def _queue(self, send: int) -> None:
        host = self._cluster.hosts[self._flow.rank_of[send]]
        if not self._is_sending[host]:
            _extend(self._spans_out[host], *self._came[send])
            _extend(self._spans_out[host], self._now, CORES)
        super()._queue(send)

    def _pass(self, free: list[float], host: int, now: float, takes: float) -> float:
        spans = (self._spans_out if free is self._out_free else self._spans_into)[host]
        begin_us = max(now, free[host])
        end_us = super()._pass(free, host, now, takes)
        if spans and begin_us <= spans[-1][1]:
            _extend(spans, end_us, BUSY)
        elif end_us > begin_us:
            spans.append((begin_us, end_us, BUSY))
        return end_us


def _extend(spans: list[Span], end_us: float, what: str) -> None:
    """Add a span after the last one, or extend the last one if it is of the same kind."""
    last = spans[-1] if spans else (0.0, 0.0, what)
    if end_us > last[1]:
        if spans and last[2] == what:
            spans[-1] = (last[0], end_us, what)
        else:
            spans.append((last[1], end_us, what))
