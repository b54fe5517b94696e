"""The cost of a call: the counts of its schedule times the costs of a cluster."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.limits import SEGMENT_BYTES
from shoal.plan.cluster import CONTENDED_BYTES, SCRATCH_KEPT_BYTES
from shoal.schedule import COLLECTIVES, Root, find
from shoal.schedule.counts import count

if TYPE_CHECKING:
    from shoal.plan.cluster import Cluster
    from shoal.schedule import Collective
    from shoal.schedule.counts import Counts, StepCounts

# A NIC whose peers change from round to round loses this part of the loss of a NIC that exchanges
# with several peers at a time. Rings, one-to-many and many-to-one traffic lose nothing (measured:
# docs/decisions/0023).
_CONTENDED_IN_TURN: Final = 0.5

# The time that a message waits for each other rank on the receiver's core: the switch, and that
# rank's turn with cold caches. For 64 KiB over 4 ranks on 2 cores, `tree` switched 2.5 times as
# often as `sharded` and took 7 to 20 us more of a core (bench/LOG.md, 2026-11-25).
_TURN_US: Final = 4.0


class Cost(NamedTuple):
    """The time that one call keeps each possible bottleneck busy, in microseconds.

    Segments follow one another, so the bottleneck is always busy except during the pipeline fill:
    `alone_us` is `max(latency, fill + max(network + contention, rank, host))`.
    """

    latency: float
    """The time of a single segment through the longest chain of messages."""
    fill: float
    """The part of `latency` before the bottleneck begins, and after it ends."""
    network: float
    """The time of the busiest NIC, in its busier direction."""
    contention: float
    """The time that this NIC loses to streams that share it."""
    rank: float
    """The time of the busiest rank, on one core."""
    host: float
    """The time of all ranks of the busiest host, on all its cores."""
    messages: float
    """The part of the larger of `rank` and `host` that does not depend on lengths."""
    one_way: bool
    """True if the next call may begin before this one has ended on every rank."""

    @property
    def busy_us(self) -> float:
        """The time for which the bottleneck is busy."""
        return max(self.network + self.contention, self.rank, self.host)

    @property
    def alone_us(self) -> float:
        """The time of a single call."""
        return max(self.latency, self.fill + self.busy_us)

    @property
    def cost_us(self) -> float:
        """The time of a call: if data flows one way, the mean of a single call and one in a row.

        In a row, such a call begins as soon as the bottleneck is free.
        """
        return (self.alone_us + self.busy_us) / 2 if self.one_way else self.alone_us

    @property
    def work_us(self) -> float:
        """The time for which cores are busy, even if they are not the bottleneck."""
        return max(self.rank, self.host)

    @property
    def bottleneck(self) -> str:
        """The name of the bottleneck: latency, network, CPU or memory."""
        if max(self.fill, self.latency - self.fill) >= self.busy_us:
            return "latency"
        if self.network + self.contention >= self.work_us:
            return "network"
        return "CPU" if self.messages >= self.work_us / 2 else "memory"


def cost_of(collective: str, name: str, n_bytes: int, cluster: Cluster) -> Cost:
    """Return the cost of an algorithm on a cluster; `n_bytes` as `choose.choose` counts them."""
    row, algorithm = COLLECTIVES[collective], find(collective, name).fitted(n_bytes, cluster.size)
    counts = count(algorithm, cluster.hosts)
    chunk = n_bytes / counts.n_chunks if row.in_place else n_bytes
    return price(counts, chunk, collective, cluster)


def price(
    counts: Counts, chunk_bytes: float, collective: str, cluster: Cluster, stream_bytes: float = 0.0
) -> Cost:
    """Return the cost of counts.

    Args:
        chunk_bytes: the mean length of a chunk.
        stream_bytes: the bytes that follow one another over a link, if more than a chunk.
    """
    return _Prices(cluster, chunk_bytes, COLLECTIVES[collective], stream_bytes).cost(counts)


@functools.lru_cache(maxsize=256)
def _most_on_a_host(hosts: tuple[int, ...]) -> int:
    return max(Counter(hosts).values())


class _Prices:
    def __init__(
        self, cluster: Cluster, n_bytes: float, row: Collective, stream_bytes: float = 0.0
    ) -> None:
        self._stream_bytes = max(n_bytes, stream_bytes)
        self._cluster, self._n_bytes = cluster, n_bytes
        self._in_place, self._root = row.in_place, row.root
        self._n_messages = max(1, -(-n_bytes // SEGMENT_BYTES))
        self._n_local = _most_on_a_host(cluster.hosts)
        n_before = max(0.0, self._n_local / cluster.n_cores - 1)  # on the receiver's core
        self._local_wait = cluster.local.latency_us + n_before * _TURN_US
        self._first = first = min(n_bytes, SEGMENT_BYTES)
        local, wire = cluster.local, cluster.wire
        memory, network = cluster.memory_us_per_byte, cluster.network_us_per_byte
        self._intra = (
            2 * local.message_us + first * (local.us_per_byte + 2 * memory) + self._local_wait
        )
        self._inter = (
            2 * wire.message_us
            + first * (wire.us_per_byte + 2 * (memory + network))
            + wire.latency_us
        )

    def cost(self, counts: Counts) -> Cost:
        """Return the cost of the counts."""
        cluster = self._cluster
        latency = counts.n_intra * self._intra + counts.n_inter * self._inter
        # A chunk of one segment waits for the chunks that are sent or received together with it.
        queued = max(work.before + work.passed_on for work in counts.hosts) - counts.n_rounds
        latency += max(0.0, queued) * self._first * cluster.wire.us_per_byte
        fresh = self._fresh(counts.n_scratch * self._n_bytes)
        rank = max(self._work(work) for work in counts.ranks) + fresh
        if self._root is Root.GIVES and self._in_place:
            # The root sends its other chunks before the one with the longest way.
            latency += rank * (1 - 1 / counts.n_chunks)
        cores = min(cluster.n_cores, self._n_local)
        host = (max(self._work(work) for work in counts.hosts) + self._n_local * fresh) / cores
        chunks = max(max(work.sent, work.received) for work in counts.hosts)
        network = chunks * self._n_bytes * cluster.wire.us_per_byte
        return Cost(
            latency=latency,
            fill=self._fill(counts, latency, rank),
            network=network,
            contention=network * self._contention(counts),
            rank=rank,
            host=host,
            messages=max(
                *(self._messages(work) for work in counts.ranks),
                *(self._messages(work) / cores for work in counts.hosts),
            ),
            one_way=self._root is not Root.NONE,
        )

    def _fill(self, counts: Counts, latency: float, rank: float) -> float:
        """Return the time of rounds in which the bottleneck is idle, or of the last message.

        In place, any rank may be the bottleneck. With blocks it is the rank that has most of them,
        and in a single round it sends while the first blocks are on their way.
        """
        if not counts.n_rounds:
            return 0.0
        n_messages = [work.intra + work.inter for work in counts.ranks]
        busy = min(n_messages) if self._in_place else max(n_messages)
        link = self._cluster.wire if counts.n_inter else self._cluster.local
        wait = self._cluster.wire.latency_us if counts.n_inter else self._local_wait
        if self._root is not Root.NONE:  # another rank still has to receive the last message
            wait += link.message_us + self._first * self._cluster.memory_us_per_byte
        elif counts.n_rounds == 1 and not self._in_place:
            wait = max(0.0, wait - rank / 2)
        return max(latency * (1 - busy / counts.n_rounds), wait)

    def _contention(self, counts: Counts) -> float:
        """Return the part of its time that a NIC loses, by its peers and their rounds."""
        if counts.n_peers <= 1:
            return 0.0
        part = 1.0 if counts.n_peers > counts.n_inter else _CONTENDED_IN_TURN
        slow = min(1.0, CONTENDED_BYTES / self._stream_bytes) if self._stream_bytes else 1.0
        return part * slow * self._cluster.contention

    def _messages(self, work: StepCounts) -> float:
        cluster = self._cluster
        each = work.intra * cluster.local.message_us + work.inter * cluster.wire.message_us
        return self._n_messages * each

    def _work(self, work: StepCounts) -> float:
        cluster = self._cluster
        per_byte = (work.shared + work.moved) * cluster.memory_us_per_byte
        per_byte += work.shared * cluster.local.us_per_byte
        per_byte += work.inter * cluster.network_us_per_byte
        return self._messages(work) + self._n_bytes * per_byte

    def _fresh(self, n_bytes: float) -> float:
        """Return the cost of scratch besides passes over it; kept memory costs nothing."""
        return n_bytes * self._cluster.fresh_us_per_byte if n_bytes > SCRATCH_KEPT_BYTES else 0.0
