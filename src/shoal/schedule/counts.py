"""Counts the work of a schedule for ranks, hosts and NICs from its steps.

Counts are in chunks and in messages of a chunk each, without costs. Every rank is counted, but only
the steps of ranks that stand in for others run, and a hierarchy is counted level by level.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from shoal.schedule.level_counts import across_hosts
from shoal.schedule.traffic import Counted, StepCounts, Traffic, sum_of

if TYPE_CHECKING:
    from shoal.schedule.algorithm import Algorithm
    from shoal.schedule.symmetry import StandIn

__all__ = ["Counts", "StepCounts", "count"]


class Counts(NamedTuple):
    """The work of a schedule on some hosts."""

    n_chunks: int
    """The chunks of the longest buffer."""
    n_scratch: int
    """The most scratch chunks of a rank."""
    ranks: tuple[StepCounts, ...]
    """The work of each rank, equal entries once."""
    hosts: tuple[StepCounts, ...]
    """The work of all ranks of each host together, equal entries once."""
    n_intra: int
    """Messages of the longest chain that stay on a host."""
    n_inter: int
    """Messages of the longest chain that go to another host."""
    n_peers: int
    """The most other hosts that one host both sends to and receives from."""

    @property
    def n_rounds(self) -> int:
        """Messages of the longest chain."""
        return self.n_intra + self.n_inter


@functools.lru_cache(maxsize=4096)
def count(algorithm: Algorithm, hosts: tuple[int, ...]) -> Counts:
    """Count the steps of all ranks, where rank 0 is the root.

    Cost: proportional to the ranks, and to the steps of those that stand in for others.
    """
    size, n_hosts = len(hosts), max(hosts) + 1
    if algorithm.levels and n_hosts in (1, size):
        return count(algorithm.levels[n_hosts == size], hosts)
    chain = algorithm.chain(size, hosts)
    n_inter = sum(hosts[source] != hosts[to] for source, to in chain)
    counted = (
        across_hosts(*algorithm.levels, hosts) if algorithm.levels else _flat(algorithm, hosts)
    )
    return Counts(
        n_chunks=algorithm.n_chunks(size, hosts),
        n_scratch=counted.n_scratch,
        ranks=tuple(dict.fromkeys(counted.ranks)),
        hosts=tuple(dict.fromkeys(counted.hosts)),
        n_intra=len(chain) - n_inter,
        n_inter=n_inter,
        n_peers=counted.n_peers,
    )


def _flat(algorithm: Algorithm, hosts: tuple[int, ...]) -> Counted:
    """Count an algorithm without levels."""
    size, n_ranks = len(hosts), Counter(hosts)
    alike: dict[int, _Alike] = {}
    by_host = [Counter[StepCounts]() for _ in n_ranks]
    n_peers = 0
    for rank, here in enumerate(hosts):
        one = algorithm.stand_in(rank, size)
        if one.rank not in alike:
            traffic = Traffic.of(algorithm.steps(one.rank, size, 0, hosts))
            alike[one.rank] = _Alike(traffic, hosts, n_ranks)
        work, n = alike[one.rank].done(rank, one)
        by_host[here][work] += 1
        n_peers = max(n_peers, n)
    return Counted(
        ranks=[work for works in by_host for work in works],
        hosts=[sum_of(works) for works in dict.fromkeys(frozenset(n.items()) for n in by_host)],
        n_scratch=max(len(algorithm.scratch(rank, size, hosts)) for rank in alike),
        n_peers=n_peers,
    )


class _Alike:
    """The ranks of one stand-in, and the counts by the peers that share their host."""

    def __init__(
        self, traffic: Traffic, hosts: tuple[int, ...], n_ranks: Mapping[int, int]
    ) -> None:
        self._traffic, self._hosts, self._n_ranks = traffic, hosts, n_ranks
        self._to, self._source = traffic.to, traffic.source
        self._is_both_ways = self._to == self._source
        self._peers = tuple(self._to | self._source)
        self._by_host = defaultdict[int, list[int]](list)
        for peer in self._peers:
            self._by_host[hosts[peer]].append(peer)
        # If all peers are near, or all are far, or all kinds of messages go to all peers, only the
        # number of peers on the host matters.
        self._is_plain = len(n_ranks) in (1, len(hosts)) or all(
            len(one.peers) == len(hosts) - 1 for one in (*traffic.sends, *traffic.receives)
        )
        self._plain: dict[int, tuple[StepCounts, int]] = {}
        self._known: dict[tuple[int, ...], StepCounts] = {}

    def done(self, rank: int, one: StandIn) -> tuple[StepCounts, int]:
        """Return the work of one rank, and the number of hosts it exchanges with both ways."""
        here = self._hosts[rank]
        n_here, n_others = self._n_ranks[here], len(self._n_ranks) - 1
        if self._is_plain:
            if n_here not in self._plain:
                n_peers = min(len(self._to), len(self._source), n_others)
                self._plain[n_here] = self._traffic.work(self._peers[: n_here - 1]), n_peers
            return self._plain[n_here]
        if one.is_swap and self._is_both_ways:
            near, n_peers = self._swapped(rank, one.rank)
        else:
            host_of = {peer: self._hosts[one.rename(peer)] for peer in self._peers}
            near = tuple(peer for peer, host in host_of.items() if host == here)
            n_peers = self._n_peers(here, host_of)
        if near not in self._known:
            self._known[near] = self._traffic.work(near)
        return self._known[near], n_peers

    def _n_peers(self, here: int, host_of: Mapping[int, int]) -> int:
        if self._is_both_ways:
            return len({*host_of.values()} - {here})
        both = ({host_of[peer] for peer in peers} - {here} for peers in (self._to, self._source))
        return min(map(len, both))

    def _swapped(self, rank: int, stand_in: int) -> tuple[tuple[int, ...], int]:
        """Return the peers on the host of a rank, and the number of other hosts with peers.

        The peers are the stand-in's, except that the two ranks swap places.
        """
        here, there = self._hosts[rank], self._hosts[stand_in]
        near = [peer for peer in self._by_host.get(here, ()) if peer != rank]
        n_peers = len(self._by_host) - (here in self._by_host)
        if rank in self._to:
            near += [rank] * (here == there)
            n_peers += here != there and there not in self._by_host
        return tuple(near), n_peers
