"""What the formulas read of a cluster, and what they say: the load of one call.

Every formula counts messages, bytes and rounds; the microseconds are worked out here, once.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from shoal.plan.cluster import Cluster

# What the engine cuts chunks into: each segment is a message of its own.
SEGMENT_BYTES: Final = 128 << 10

# Many senders to one cable fill its queue and lose packets; a ring has one sender per cable.
# Measured for sharded over four hosts at 1 Gbit/s (bench/LOG.md).
INCAST: Final = 1.2


class Load(NamedTuple):
    """What one call takes of each thing that can be the narrowest, in microseconds.

    Segments follow one another, so what is narrowest is busy all the time but for the beginning
    and the end: `cost_us` is `max(path, fill + max(wire, rank, host))`.

    Args:
        path: one segment's way through all rounds, were it alone.
        fill: the part of it in which the narrowest has not begun yet, or has ended.
        wire: the busiest cable, in its busier direction.
        rank: the busiest rank, which works with one core at a time.
        host: all ranks of the busiest host, on all its cores.
    """

    path: float
    fill: float
    wire: float
    rank: float
    host: float

    def then(self, *others: Load) -> Load:
        """The load of phases that each segment goes through one after another."""
        return Load(*map(sum, zip(self, *others, strict=True)))

    @property
    def cost_us(self) -> float:
        """How long the call takes."""
        return max(self.path, self.fill + max(self.wire, self.rank, self.host))

    @property
    def limit(self) -> str:
        """What it is that takes so long."""
        busy = max(self.wire, self.rank, self.host)
        if max(self.fill, self.path - self.fill) >= busy:
            return "latency"
        if self.wire >= max(self.rank, self.host):
            return "the cable"
        return "the cores of a host" if self.host >= self.rank else "one core"


@dataclass(frozen=True, slots=True)
class Site:
    """A cluster as the formulas see it; n, r and h in their comments are `size`, `here`, `n_hosts`.

    Args:
        size: n, how many ranks take part.
        n_hosts: h, on how many hosts.
        here: r, how many of them are on the fullest host. It is taken as every host's.
        rails: how many are on the emptiest.
        crossings: how many of the n edges of the ring 0, 1, ... n-1, 0 lead to another host.
        exits: how many of them at most leave one host.
        in_blocks: whether the ranks of every host follow one another.
        share: how many such calls run at once on the same hosts: the rails of a hierarchy.
    """

    cluster: Cluster
    size: int
    n_hosts: int
    here: int
    rails: int
    crossings: int
    exits: int
    in_blocks: bool
    share: int = 1

    @property
    def near(self) -> int:
        """How many peers of a rank are on its own host."""
        return self.here - 1

    @property
    def far(self) -> int:
        """How many are not."""
        return self.size - self.here

    @property
    def inside(self) -> Site:
        """One host alone."""
        return replace(self, size=self.here, n_hosts=1, crossings=0, exits=0, in_blocks=True)

    @property
    def across(self) -> Site:
        """One rank of each host; as many such calls run at once as a host has ranks."""
        n = self.n_hosts
        return replace(
            *(self,), size=n, here=1, rails=1, crossings=n, exits=1, in_blocks=True, share=self.here
        )

    @property
    def near_rounds(self) -> int:
        """How many of the distances 1, 2, 4, ... stay on a host."""
        if self.n_hosts == 1:
            return (self.size - 1).bit_length()
        return (self.here - 1).bit_length() if self.in_blocks else 0

    def hop(self, n_bytes: float, *, far: bool | None = None) -> float:
        """One message from memory to memory: its first segment, all ends included.

        Args:
            far: to another host; left out: if there is one.
        """
        link = (
            self.cluster.wire if (self.n_hosts > 1 if far is None else far) else self.cluster.local
        )
        first = min(n_bytes, SEGMENT_BYTES)
        ends = 2 * link.message_us + 2 * self.copy(n_bytes)
        return ends + link.latency_us + first * link.us_per_byte

    def hops(self, near: float, far: float, n_bytes: float) -> float:
        """So many messages one after another."""
        far_us = far * self.hop(n_bytes, far=True) if far else 0.0
        return near * self.hop(n_bytes, far=False) + far_us

    def copy(self, n_bytes: float) -> float:
        """The copy or fold of one segment."""
        return min(n_bytes, SEGMENT_BYTES) * self.cluster.memory_us_per_byte

    def load(
        self,
        n_bytes: float,
        *,
        path: float,
        fill: float,
        ends: tuple[float, float],
        memory: float,
        cable: float = 0.0,
        host: tuple[float, float, float] | None = None,
    ) -> Load:
        """Counts, priced.

        Args:
            n_bytes: of a message.
            path: see `Load`.
            fill: see `Load`.
            ends: messages that the busiest rank sends and receives: on its host, and beyond.
            memory: bytes that it copies or folds.
            cable: bytes through the busiest cable in its busier direction.
            host: `ends` and `memory` of all ranks of the busiest host; left out: all are alike.
        """
        rank_us = self._work(n_bytes, *ends, memory)
        host_us = self.here * rank_us if host is None else self._work(n_bytes, *host)
        on_host = self.here * self.share
        cores = min(self.cluster.n_cores, on_host)
        return Load(
            path=path,
            fill=fill,
            wire=self.share * cable * self.cluster.wire.us_per_byte,
            rank=rank_us,
            host=self.share * host_us / cores,
        )

    def _work(self, n_bytes: float, near: float, far: float, memory: float) -> float:
        n_segments = max(1, -(-n_bytes // SEGMENT_BYTES))
        cluster = self.cluster
        ends_us = near * cluster.local.message_us + far * cluster.wire.message_us
        return n_segments * ends_us + memory * cluster.memory_us_per_byte


@functools.lru_cache(maxsize=256)
def site_of(cluster: Cluster) -> Site:
    """The facts of a cluster that the formulas need. Cost: proportional to its ranks, once."""
    hosts = cluster.hosts
    ranks = Counter(hosts)
    edges = list(zip(hosts, (*hosts[1:], hosts[0]), strict=True))
    leaving = Counter(a for a, b in edges if a != b)
    n_runs = 1 + sum(a != b for a, b in edges[:-1])
    return Site(
        cluster=cluster,
        size=len(hosts),
        n_hosts=len(ranks),
        here=max(ranks.values()),
        rails=min(ranks.values()),
        crossings=leaving.total(),
        exits=max(leaving.values(), default=0),
        in_blocks=n_runs == len(ranks),
    )
