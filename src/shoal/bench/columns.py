"""One library at one kind of call: what it took at each size, and whether it was right."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from shoal.bench.benchmark import Benchmark
from shoal.bench.collectives import COLLECTIVES, CallSpec
from shoal.bench.failure import Failure

if TYPE_CHECKING:
    from shoal.bench.case import Case
    from shoal.bench.sweep import CallKind, Sweep
    from shoal.bench.worker_pools import WorkerPools

OURS: Final = "shoal"

Answers = Sequence[Mapping[str, Any]]

_OVER_RANKS: Final[Sequence[Callable[[Sequence[float]], float]]] = (
    lambda times_s: times_s[0],
    statistics.fmean,
    min,
    max,
)
"""What one call took, from what it took on each rank; by the number that -a takes."""


@dataclass
class Taken:
    """What calls of one size took.

    Args:
        times_s: of each call, over the ranks as asked for.
        cpu_s: per call and rank, of each round.
        sent, received: bytes per call and rank over the NICs of its host, of each round; empty
            where all ranks share a host.
        n_wrong: elements; None where nothing was checked.
    """

    times_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    received: list[float] = field(default_factory=list)
    n_wrong: int | None = None


class Column:
    """Measures one library at one kind of call, a round at a time.

    Args:
        name: of the library, as tables call it.
    """

    def __init__(self, name: str, sweep: Sweep, kind: CallKind, in_place: bool) -> None:
        self.name, self.in_place = name, in_place
        self.taken: dict[Case, Taken] = {}
        self._library = sweep.library if name == OURS else name
        self._sweep, self._kind = sweep, kind
        self._n_on_host: list[int] = []
        self._failure = ""

    @property
    def label(self) -> str:
        """The name in the rows of a section."""
        return f"{self.name}, {way_of(self.in_place)}"

    def benchmark(self) -> Benchmark:
        """As a section takes it."""
        return Benchmark(self.label, self.measure)

    def measure(self, pools: WorkerPools, case: Case) -> float:
        """Seconds of the median call of one more round.

        Raises:
            Failure: the library cannot be started, or has failed, be it at another size.
        """
        if self._failure:
            raise Failure(self._failure)
        try:
            return self._measure(pools, case)
        except Failure as failure:
            self._failure = str(failure)
            raise

    def _measure(self, pools: WorkerPools, case: Case) -> float:
        what, sweep = self._spec(case)._asdict(), self._sweep
        is_first = case not in self.taken
        taken = self.taken.setdefault(case, Taken())
        if is_first and sweep.n_checks:
            checks = [
                pools.ask(self._library, case, "check", **what) for _ in range(sweep.n_checks)
            ]
            taken.n_wrong = sum(rank["n_wrong"] for answers in checks for rank in answers)
        number = len(taken.cpu_s)
        answers = pools.ask(
            self._library,
            case,
            "measure",
            **what,
            n_calls=1,
            n_samples=sweep.n_calls // sweep.n_rounds + (number < sweep.n_calls % sweep.n_rounds),
            n_warmup=sweep.n_warmup if is_first else min(1, sweep.n_warmup),
            is_apart=sweep.is_apart,
        )
        return self._add(taken, answers, self._ranks_on_hosts(pools, case))

    def _spec(self, case: Case) -> CallSpec:
        kind = self._kind
        return CallSpec(
            case.n_bytes,
            collective=kind.collective,
            dtype=kind.element.name,
            op=kind.op or "sum",
            root=max(kind.root, 0),
            in_place=self.in_place,
        )

    def _ranks_on_hosts(self, pools: WorkerPools, case: Case) -> Sequence[int]:
        """Of each rank: how many ranks its host has."""
        if not self._n_on_host:
            hosts = [(who["host"], who["net"]) for who in pools.ask(self._library, case, "who")]
            counts = Counter(hosts)
            self._n_on_host = [counts[host] for host in hosts]
        return self._n_on_host

    def _add(self, taken: Taken, answers: Answers, n_on_host: Sequence[int]) -> float:
        times_s = over_ranks([rank["times_s"] for rank in answers], self._sweep.average)
        taken.times_s += times_s
        taken.cpu_s.append(statistics.fmean(statistics.fmean(rank["cpu_s"]) for rank in answers))
        if n_on_host[0] < len(answers):
            for way, rounds in (("sent", taken.sent), ("received", taken.received)):
                each = zip(answers, n_on_host, strict=True)
                rounds.append(statistics.fmean(rank[way] / n for rank, n in each))
        return statistics.median(times_s)


def over_ranks(times_s: Sequence[Sequence[float]], average: int) -> list[float]:
    """Of each call what it took over the ranks: on rank 0, in the mean, at least, at most."""
    return [_OVER_RANKS[average](call) for call in zip(*times_s, strict=True)]


def way_of(in_place: bool) -> str:
    """In words."""
    return "in place" if in_place else "out of place"


def columns_of(sweep: Sweep, kind: CallKind) -> list[Column]:
    """Shoal in each way that it has, and each peer in the same ways."""
    return [
        Column(name, sweep, kind, in_place)
        for in_place in COLLECTIVES[kind.collective].in_place
        for name in (OURS, *sweep.peers)
    ]
