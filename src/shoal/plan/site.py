"""What the formulas read of a cluster, and what they say: the load of one call.

Every formula counts messages, bytes and rounds; the microseconds are worked out here, once.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.plan.cluster import SCRATCH_KEPT_BYTES

if TYPE_CHECKING:
    from shoal.plan.cluster import Cluster

# What the engine cuts chunks into: each segment is a message of its own.
SEGMENT_BYTES: Final = 128 << 10

# What a cable loses to streams that come and go, measured on 4 and 8 hosts at 1 Gbit/s against the
# ring's one steady stream, which loses nothing (docs/decisions/0007): several senders at a time
# fill its queue, the more the worse; exchanges with one peer after another begin slowly each time.
_LOST_PER_SENDER: Final = 0.08
_MOST_LOST: Final = 1.0
_LOST_TO_EXCHANGES: Final = 0.4
_LOST_TO_TREES: Final = 0.6


class Load(NamedTuple):
    """What one call takes of each thing that can be the narrowest, in microseconds.

    Segments follow one another, so what is narrowest is busy all the time but for the beginning
    and the end: `cost_us` is `max(path, fill + max(wire + lost, rank, host))`.

    Args:
        path: one segment's way through all rounds, were it alone.
        fill: the part of it in which the narrowest has not begun yet, or has ended.
        wire: the busiest cable, in its busier direction.
        rank: the busiest rank, which works with one core at a time.
        host: all ranks of the busiest host, on all its cores.
        lost: what that cable loses to the streams that share it, besides.
    """

    path: float
    fill: float
    wire: float
    rank: float
    host: float
    lost: float = 0.0

    def then(self, *others: Load) -> Load:
        """The load of phases that each segment goes through one after another."""
        return Load(*map(sum, zip(self, *others, strict=True)))

    @property
    def cost_us(self) -> float:
        """How long the call takes."""
        return max(self.path, self.fill + max(self.wire + self.lost, self.rank, self.host))

    @property
    def work_us(self) -> float:
        """How long it keeps cores busy, whether that holds it up or not."""
        return max(self.rank, self.host)

    @property
    def limit(self) -> str:
        """What it is that takes so long."""
        wire = self.wire + self.lost
        if max(self.fill, self.path - self.fill) >= max(wire, self.rank, self.host):
            return "latency"
        if wire >= max(self.rank, self.host):
            return "the cable"
        return "the cores of a host" if self.host >= self.rank else "one core"


class Site(NamedTuple):
    """A cluster as the formulas see it; n, r and h in their comments are `size`, `here`, `n_hosts`.

    Args:
        size: n, how many ranks take part.
        n_hosts: h, on how many hosts.
        here: r, how many of them are on the fullest host. It is taken as every host's.
        crossings: how many of the n edges of the ring 0, 1, ... n-1, 0 lead to another host.
        exits: how many of them at most leave one host.
        in_blocks: whether the ranks of every host follow one another.
        share: how many such calls run at once on the same hosts: the rails of a hierarchy.
        pieces: how many messages a chunk is sent as, since something else cuts it further.
    """

    cluster: Cluster
    size: int
    n_hosts: int
    here: int
    crossings: int
    exits: int
    in_blocks: bool
    share: int = 1
    pieces: int = 1

    @property
    def near(self) -> int:
        """How many peers of a rank are on its own host."""
        return self.here - 1

    @property
    def far(self) -> int:
        """How many are not."""
        return self.size - self.here

    @property
    def lost_to_all(self) -> float:
        """What a cable loses where all other hosts send at a time."""
        return min(_MOST_LOST, _LOST_PER_SENDER * (self.n_hosts - 1) * (self.n_hosts > 2))

    @property
    def lost_to_pairs(self) -> float:
        """What it loses where ranks meet one peer after another."""
        return _LOST_TO_EXCHANGES if self.n_hosts > 2 else 0.0

    @property
    def lost_to_trees(self) -> float:
        """What it loses to trees."""
        return _LOST_TO_TREES if self.n_hosts > 2 else 0.0

    def inside(self, pieces: int) -> Site:
        """One host alone, with chunks in so many pieces."""
        return self._replace(
            size=self.here, n_hosts=1, crossings=0, exits=0, in_blocks=True, pieces=pieces
        )

    @property
    def across(self) -> Site:
        """One rank of each host; as many such calls run at once as a host has ranks."""
        n = self.n_hosts
        return self._replace(size=n, here=1, crossings=n, exits=1, in_blocks=True, share=self.here)

    @property
    def near_rounds(self) -> int:
        """How many of the distances 1, 2, 4, ... stay on a host."""
        if self.n_hosts == 1:
            return (self.size - 1).bit_length()
        return (self.here - 1).bit_length() if self.in_blocks else 0

    def at_edge(self, near: float, far: float) -> tuple[float, float]:
        """The ends of the first rank of a host, where a rank sends so many down and gets as many.

        It is there that even the near rounds leave the host.
        """
        return (2 * near, 2 * far) if self.n_hosts == 1 else (near, near + 2 * far)

    def corners(self) -> tuple[int, int, int]:
        """Of a hypercube on these ranks: near rounds, far rounds, and 1 if some ranks are extra.

        Extra ranks share corners with others, so fewer corners are near each other.
        """
        rounds = self.size.bit_length() - 1
        extra = int(self.size & (self.size - 1) > 0)
        near = min(self.near_rounds, rounds)
        if near and self.n_hosts > 1:
            near -= extra
        return near, rounds - near, extra

    @property
    def turns(self) -> float:
        """How many ranks take turns on a core: so much longer a message waits to be seen."""
        return max(1.0, self.here * self.share / self.cluster.n_cores)

    def end(self, n_bytes: float) -> float:
        """What one end of a message has to do: the message, and a pass over its first segment."""
        link = self.cluster.wire if self.n_hosts > 1 else self.cluster.local
        return link.message_us + self.copy(n_bytes)

    def hop(self, n_bytes: float, *, far: bool | None = None) -> float:
        """One message from memory to memory: its first segment, all ends included.

        Args:
            far: to another host; left out: if there is one.
        """
        cluster, first = self.cluster, self._first(n_bytes)
        if self.n_hosts > 1 if far is None else far:
            ends = 2 * cluster.wire.message_us + 2 * first * cluster.memory_us_per_byte
            return ends + cluster.wire.latency_us + first * cluster.wire.us_per_byte
        passes = cluster.local.us_per_byte + 2 * cluster.memory_us_per_byte
        waited = self.turns * cluster.local.latency_us
        return 2 * cluster.local.message_us + first * passes + waited

    @property
    def wait(self) -> float:
        """How long nothing happens after a message has left."""
        cluster = self.cluster
        if self.n_hosts > 1:
            return cluster.wire.latency_us
        return self.turns * cluster.local.latency_us

    def hops(self, near: float, far: float, n_bytes: float) -> float:
        """So many messages one after another."""
        far_us = far * self.hop(n_bytes, far=True) if far else 0.0
        return (near * self.hop(n_bytes, far=False) if near else 0.0) + far_us

    def passing(self, n_bytes: float) -> float:
        """How long the first segment occupies a cable."""
        return self.share * self._first(n_bytes) * self.cluster.wire.us_per_byte

    def copy(self, n_bytes: float) -> float:
        """The copy or fold of one segment."""
        return self._first(n_bytes) * self.cluster.memory_us_per_byte

    def load(  # noqa: PLR0913 - so many things are counted
        self,
        n_bytes: float,
        *,
        path: tuple[float, float],
        ends: tuple[float, float],
        memory: tuple[float, float],
        cable: tuple[float, float] = (0.0, 0.0),
        scratch: float = 0.0,
        at_once: bool = False,
        host: tuple[float, float, float, float] | None = None,
    ) -> Load:
        """Counts, priced. All bytes are multiples of `n_bytes`, which is that of a message.

        Args:
            path: and `fill`; see `Load`. In microseconds.
            ends: messages that the busiest rank sends and receives: on its host, and beyond.
            memory: how many bytes it copies for peers on its host, where those that many read count
                once; and how many otherwise: of every receive, and every send to a far rank.
            cable: how many go through the busiest cable in its busier direction, and which part of
                their time it loses besides.
            scratch: how much scratch memory the rank with the most needs.
            at_once: whether a rank's sends wait for nothing, so that it is at work while the first
                is on its way.
            host: `ends` and `memory` of all ranks of the busiest host; left out: all are
                alike.
        """
        wire_us = self.share * cable[0] * n_bytes * self.cluster.wire.us_per_byte
        rank_us = self._work(n_bytes, *ends, *memory)
        host_us = self.here * rank_us if host is None else self._work(n_bytes, *host)
        fresh_us = self._fresh(scratch * n_bytes)
        cores = min(self.cluster.n_cores, self.here * self.share)
        return Load(
            path=path[0],
            fill=max(0.0, path[1] - rank_us / 2) if at_once else path[1],
            wire=wire_us,
            lost=wire_us * cable[1],
            rank=rank_us + fresh_us,
            host=self.share * (host_us + self.here * fresh_us) / cores,
        )

    def _fresh(self, n_bytes: float) -> float:
        """What scratch costs besides the passes over it: nothing where the memory is kept."""
        return n_bytes * self.cluster.fresh_us_per_byte if n_bytes > SCRATCH_KEPT_BYTES else 0.0

    def _work(self, n_bytes: float, near: float, far: float, sent: float, passed: float) -> float:
        cluster = self.cluster
        n_messages = self.pieces * max(1, -(-n_bytes // (self.pieces * SEGMENT_BYTES)))
        ends_us = near * cluster.local.message_us + far * cluster.wire.message_us
        bytes_us = sent * cluster.local.us_per_byte + (sent + passed) * cluster.memory_us_per_byte
        return n_messages * ends_us + n_bytes * bytes_us

    def _first(self, n_bytes: float) -> float:
        return min(n_bytes / self.pieces, SEGMENT_BYTES)


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
        crossings=leaving.total(),
        exits=max(leaving.values(), default=0),
        in_blocks=n_runs == len(ranks),
    )
