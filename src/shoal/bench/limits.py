"""What the network lets a collective reach at best: the line drawn in tables and reports."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.bench.case import Case
from shoal.bench.collectives import COLLECTIVES
from shoal.bench.measures import raw_rate
from shoal.lab import ring_of

if TYPE_CHECKING:
    from shoal.bench.points import SizePoint
    from shoal.bench.sweep import BenchPlace
    from shoal.bench.worker_pools import WorkerPools


@dataclass
class Limit:
    """What the NICs of a lab carry.

    Args:
        rate_mbit: that they are shaped to; None: they are not.
        raw_bytes_per_s: what raw TCP streams reached, all hosts sending in a ring, the slowest of
            them; each time it was measured, which is before the first call and after the last.
    """

    place: BenchPlace
    raw_bytes_per_s: list[float] = field(default_factory=list)

    def measure(self, pools: WorkerPools) -> None:
        """Let raw streams run once more."""
        place = self.place
        case = Case(place.n_ranks, 0, n_hosts=place.n_hosts, rate_mbit=place.rate_mbit)
        self.raw_bytes_per_s.append(raw_rate(pools, case, ring_of(place.n_hosts)))

    def time_s(self, collective: str, n_bytes: int) -> float | None:
        """The least that a call takes at the rate of the raw streams; None where nothing says so.

        What a host must send or get at least goes over its NIC, whatever the algorithm: for
        collectives that are the same on all hosts a host counts as a rank of `bus`.
        """
        n_crossing = crossing_bytes(collective, n_bytes, self.place)
        if not self.raw_bytes_per_s or n_crossing is None:
            return None
        return n_crossing / statistics.fmean(self.raw_bytes_per_s)


def crossing_bytes(collective: str, n_bytes: int, place: BenchPlace) -> float | None:
    """What some host must send or get at least in a call; None where hosts need not talk."""
    row, n_on_host = COLLECTIVES[collective], place.n_ranks // max(place.n_hosts, 1)
    if place.n_hosts < 2 or n_bytes == 0 or (row.in_pairs and n_on_host > 1):
        return None
    return row.bus(place.n_hosts) * n_bytes * (n_on_host if row.each else 1)


def share_of(limit: Limit | None, point: SizePoint, time_s: float) -> float | None:
    """How much of the line a call of that time uses: 1 is all of it."""
    least_s = limit.time_s(point.kind.collective, point.n_bytes) if limit else None
    return least_s / time_s if least_s and time_s else None
