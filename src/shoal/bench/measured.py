"""One library at one kind of call: its times by size, and whether its results are right."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from shoal.bench.collectives import COLLECTIVES, CallSpec
from shoal.bench.job import Failure

if TYPE_CHECKING:
    from shoal.bench.sweep import CallKind, Sweep

OURS: Final = "shoal"

Ask = Callable[..., list[dict[str, Any]]]
"""A function that sends a command to every rank: (library, command, arguments by name)."""


class CallTimes(NamedTuple):
    """Statistics of the seconds of calls, as nccl-tests defines them."""

    avg: float
    p50: float
    p95: float
    p99: float


def call_times(times_s: Sequence[float]) -> CallTimes:
    """Return the statistics of at least one call.

    A percentile is a measured time: the smallest that this percentage of calls does not exceed. The
    median of an even number of calls is the larger of the two in the middle.
    """
    ordered, n = sorted(times_s), len(times_s)

    def at(percent: int) -> float:
        return ordered[min(n - 1, (n * percent + 99) // 100 - 1)]

    return CallTimes(statistics.fmean(ordered), ordered[n // 2], at(95), at(99))


@dataclass
class Figures:
    """One library in one way at one size.

    Args:
        bus: the factor of bus bandwidth.
        times_s: the time of each call on its slowest rank.
        rounds_s: the median call of each round.
        cpu_s: CPU seconds per call and rank, of each round.
        sent, received: bytes per call and rank over the NICs of its host, of each round; empty if
            all ranks share a host.
        n_wrong: wrong elements; None if nothing was checked.
        failure: the reason for missing numbers; empty if there are numbers.
    """

    library: str
    in_place: bool
    n_bytes: int
    bus: float
    times_s: list[float] = field(default_factory=list)
    rounds_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)
    n_wrong: int | None = None
    failure: str = ""

    @property
    def times(self) -> CallTimes:
        """Statistics of the calls; only valid without a failure."""
        return call_times(self.times_s)

    @property
    def alg_gb_s(self) -> float:
        """Bytes of the call over its mean time, in GB of 10^9 bytes."""
        return self.n_bytes / self.times.avg / 1e9 if self.times.avg else 0.0

    @property
    def bus_gb_s(self) -> float:
        """`alg_gb_s` times the bus factor of the collective."""
        return self.alg_gb_s * self.bus

    @property
    def way(self) -> str:
        return "in place" if self.in_place else "out of place"


@dataclass(frozen=True)
class SizePoint:
    """One size of one kind of call: all libraries, each in all its ways.

    `least_s` is the time that the network allows; None: unknown.
    """

    kind: CallKind
    n_bytes: int
    count: int
    least_s: float | None
    figures: Sequence[Figures]

    def ours(self, in_place: bool) -> Figures | None:
        """Return shoal's figures, if it has this way and no failure."""
        return next(
            (
                one
                for one in self.figures
                if one.library == OURS and one.in_place == in_place and not one.failure
            ),
            None,
        )

    def ratio(self, peer: Figures) -> float | None:
        """Return a peer's time over shoal's, the median over the rounds.

        None: one of the two has no number, or a wrong result.
        """
        ours = self.ours(peer.in_place)
        if peer.library == OURS or ours is None or peer.failure or ours.n_wrong or peer.n_wrong:
            return None
        rounds = zip(peer.rounds_s, ours.rounds_s, strict=True)
        return statistics.median(theirs_s / ours_s for theirs_s, ours_s in rounds)

    @property
    def n_wrong(self) -> int:
        """The wrong elements of all libraries and ways."""
        return sum(one.n_wrong or 0 for one in self.figures)


class Column:
    """Measures one library, by its name in tables, at one kind of call, a round at a time.

    `failure` is the reason why it is not measured any more, or empty.
    """

    def __init__(self, name: str, sweep: Sweep, kind: CallKind, in_place: bool) -> None:
        self.name, self.in_place, self.failure = name, in_place, ""
        self.library = sweep.library if name == OURS else name
        self._sweep, self._kind = sweep, kind
        self._n_on_host: list[int] = []

    def at(self, n_bytes: int) -> Figures:
        """Return figures of a size, without a number yet."""
        bus = COLLECTIVES[self._kind.collective].bus(self._sweep.place.n_ranks)
        return Figures(self.name, self.in_place, n_bytes, bus)

    def measure(self, ask: Ask, figures: Figures) -> None:
        """Measure one more round, unless the library has failed at any size."""
        try:
            if not self.failure:
                self._measure(ask, figures)
        except Failure as failure:
            self.failure = str(failure)
        figures.failure = self.failure

    def _measure(self, ask: Ask, figures: Figures) -> None:
        what, sweep = self._spec(figures.n_bytes)._asdict(), self._sweep
        number = len(figures.cpu_s)
        if number == 0 and sweep.n_checks:
            checks = [ask(self.library, "check", **what) for _ in range(sweep.n_checks)]
            figures.n_wrong = sum(rank["n_wrong"] for answers in checks for rank in answers)
        answers = ask(
            self.library,
            "measure",
            **what,
            n_calls=1,
            n_samples=sweep.n_calls // sweep.n_rounds + (number < sweep.n_calls % sweep.n_rounds),
            n_warmup=sweep.n_warmup if number == 0 else min(1, sweep.n_warmup),
            is_apart=sweep.is_apart,
        )
        self._add(figures, answers, self._ranks_on_hosts(ask))

    def _spec(self, n_bytes: int) -> CallSpec:
        kind = self._kind
        return CallSpec(
            n_bytes,
            collective=kind.collective,
            dtype=kind.element.name,
            op=kind.op or "sum",
            root=max(kind.root, 0),
            in_place=self.in_place,
        )

    def _ranks_on_hosts(self, ask: Ask) -> Sequence[int]:
        if not self._n_on_host:
            hosts = [(who["host"], who["net"]) for who in ask(self.library, "who")]
            counts = Counter(hosts)
            self._n_on_host = [counts[host] for host in hosts]
        return self._n_on_host

    def _add(
        self, figures: Figures, answers: Sequence[Mapping[str, Any]], n_on_host: Sequence[int]
    ) -> None:
        times_s = [max(call) for call in zip(*(rank["times_s"] for rank in answers), strict=True)]
        figures.times_s += times_s
        figures.rounds_s.append(statistics.median(times_s))
        figures.cpu_s.append(statistics.fmean(statistics.fmean(rank["cpu_s"]) for rank in answers))
        if n_on_host[0] < len(answers):
            for way, rounds in (("sent", figures.sent), ("received", figures.received)):
                each = zip(answers, n_on_host, strict=True)
                rounds.append(statistics.fmean(rank[way] / n for rank, n in each))


def columns_of(sweep: Sweep, kind: CallKind) -> list[Column]:
    """Return a column for each way of shoal, and for each peer in the same ways."""
    return [
        Column(name, sweep, kind, in_place)
        for in_place in COLLECTIVES[kind.collective].in_place
        for name in (OURS, *sweep.peers)
    ]
