"""What a call takes: the counts of its schedule, priced by the costs of a cluster."""

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

# Where a NIC's peers change from round to round, it loses so much of what it does where it
# exchanges with several at a time. Many that send to one lose nothing, nor one that sends to many,
# nor a ring (measured: docs/decisions/0023).
_CONTENDED_IN_TURN: Final = 0.5

# What a message waits for each other rank that has the receiver's core: the switch, and that rank's
# turn with cold caches. Of 64 KiB over 4 ranks on 2 cores, `tree` switched 2.5 times as often as
# `sharded` and took 7 to 20 us more of a core (bench/LOG.md, 2026-11-25).
_TURN_US: Final = 4.0


class Cost(NamedTuple):
    """What one call takes of each thing that can be the bottleneck, in microseconds.

    Segments follow one another, so the bottleneck is busy all the time but for the pipeline fill:
    `alone_us` is `max(latency, fill + max(network + contention, rank, host))`.
    """

    latency: float
    """One segment's way through the longest chain of messages, were it alone."""
    fill: float
    """The part of it in which the bottleneck has not begun yet, or has ended."""
    network: float
    """The busiest NIC, in its busier direction."""
    contention: float
    """What that NIC loses to streams that share it, besides."""
    rank: float
    """The busiest rank, which works with one core at a time."""
    host: float
    """All ranks of the busiest host, on all its cores."""
    messages: float
    """The part of the larger of these two that messages take whatever their length."""
    one_way: bool
    """Whether a next call need not wait until this one is over everywhere."""

    @property
    def busy_us(self) -> float:
        """How long the bottleneck is busy."""
        return max(self.network + self.contention, self.rank, self.host)

    @property
    def alone_us(self) -> float:
        """How long a call takes that comes alone."""
        return max(self.latency, self.fill + self.busy_us)

    @property
    def cost_us(self) -> float:
        """How long a call takes: alone and in a row of calls, half each.

        In a row, where data flows one way, a call begins as soon as the bottleneck is free.
        """
        return (self.alone_us + self.busy_us) / 2 if self.one_way else self.alone_us

    @property
    def work_us(self) -> float:
        """How long it keeps cores busy, whether they are the bottleneck or not."""
        return max(self.rank, self.host)

    @property
    def bottleneck(self) -> str:
        """What it is that takes so long."""
        if max(self.fill, self.latency - self.fill) >= self.busy_us:
            return "latency"
        if self.network + self.contention >= self.work_us:
            return "network"
        return "CPU" if self.messages >= self.work_us / 2 else "memory"


def cost_of(collective: str, name: str, n_bytes: int, cluster: Cluster) -> Cost:
    """What an algorithm takes of a cluster; `n_bytes` as `choose.choose` counts them.

    Raises:
        UsageError: there is no such algorithm.
    """
    row, algorithm = COLLECTIVES[collective], find(collective, name).fitted(n_bytes, cluster.size)
    counts = count(algorithm, cluster.hosts)
    chunk = n_bytes / counts.n_chunks if row.in_place else n_bytes
    return price(counts, chunk, collective, cluster)


def price(
    counts: Counts, chunk_bytes: float, collective: str, cluster: Cluster, stream_bytes: float = 0.0
) -> Cost:
    """What counts take where a chunk of the mean length has so many bytes.

    Args:
        stream_bytes: that go over a link one after the other, where that is more than a chunk.
    """
    return _Prices(cluster, chunk_bytes, COLLECTIVES[collective], stream_bytes).cost(counts)


@functools.lru_cache(maxsize=256)
def oversubscription(cluster: Cluster) -> float:
    """How many ranks share a core of the fullest host."""
    return max(1.0, fullest(cluster) / cluster.n_cores)


@functools.lru_cache(maxsize=256)
def fullest(cluster: Cluster) -> int:
    """How many ranks are on the host that has most."""
    return max(Counter(cluster.hosts).values())


class _Prices:
    """What messages of one chunk cost in a cluster."""

    def __init__(
        self, cluster: Cluster, n_bytes: float, row: Collective, stream_bytes: float = 0.0
    ) -> None:
        self._stream_bytes = max(n_bytes, stream_bytes)
        self._cluster, self._n_bytes = cluster, n_bytes
        self._in_place, self._root = row.in_place, row.root
        self._n_messages = max(1, -(-n_bytes // SEGMENT_BYTES))
        others = oversubscription(cluster) - 1  # that have the receiver's core before it
        self._local_wait = cluster.local.latency_us + others * _TURN_US
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
        """Price the counts."""
        cluster = self._cluster
        latency = counts.n_intra * self._intra + counts.n_inter * self._inter
        # What a chunk of one segment waits for that is sent or received together with it.
        queued = max(work.before + work.passed_on for work in counts.hosts) - counts.n_rounds
        latency += max(0.0, queued) * self._first * cluster.wire.us_per_byte
        fresh = self._fresh(counts.n_scratch * self._n_bytes)
        rank = max(self._work(work) for work in counts.ranks) + fresh
        if self._root is Root.GIVES and self._in_place:
            # It has other chunks to send before the one that goes the longest way.
            latency += rank * (1 - 1 / counts.n_chunks)
        n_ranks = fullest(cluster)
        cores = min(cluster.n_cores, n_ranks)
        host = (max(self._work(work) for work in counts.hosts) + n_ranks * fresh) / cores
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
        """The rounds in which the bottleneck has nothing to do, or the wait for the last message.

        In place, any rank may be the bottleneck. Of blocks it is the one that has most, and in a
        single round it sends while the first are on their way.
        """
        if not counts.n_rounds:
            return 0.0
        n_messages = [work.intra + work.inter for work in counts.ranks]
        busy = min(n_messages) if self._in_place else max(n_messages)
        link = self._cluster.wire if counts.n_inter else self._cluster.local
        wait = self._cluster.wire.latency_us if counts.n_inter else self._local_wait
        if self._root is not Root.NONE:  # the last message still has to be taken by another rank
            wait += link.message_us + self._first * self._cluster.memory_us_per_byte
        elif counts.n_rounds == 1 and not self._in_place:
            wait = max(0.0, wait - rank / 2)
        return max(latency * (1 - busy / counts.n_rounds), wait)

    def _contention(self, counts: Counts) -> float:
        """By the pattern: with how many hosts a NIC exchanges, and in how many rounds."""
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
        """What scratch costs besides the passes over it: nothing where the memory is kept."""
        return n_bytes * self._cluster.fresh_us_per_byte if n_bytes > SCRATCH_KEPT_BYTES else 0.0
