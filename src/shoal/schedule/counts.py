"""Counts the work of a schedule for ranks, hosts and NICs from its steps.

Counts are in chunks and in messages of a chunk each, without costs. Every rank is counted, but only
the steps of ranks that stand in for others run.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple

from shoal.schedule.hierarchical import teams_of
from shoal.schedule.traffic import StepCounts, Traffic, sum_of

if TYPE_CHECKING:
    from collections.abc import Iterator

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

    Cost: proportional to the ranks, and to the steps of ranks that stand in for others.
    """
    size, n_hosts = len(hosts), max(hosts) + 1
    if algorithm.levels and n_hosts in (1, size):
        return count(algorithm.levels[n_hosts == size], hosts)
    chain = algorithm.chain(size, hosts)
    n_inter = sum(hosts[source] != hosts[to] for source, to in chain)
    by_host = [Counter[StepCounts]() for _ in range(n_hosts)]
    every = set[_Counted]()
    for rank, one in (_of_levels if algorithm.levels else _flat)(algorithm, hosts):
        by_host[hosts[rank]][one.work] += 1
        every.add(one)
    return Counts(
        n_chunks=algorithm.n_chunks(size, hosts),
        n_scratch=max(one.n_scratch for one in every),
        ranks=tuple(dict.fromkeys(work for works in by_host for work in works)),
        hosts=tuple(
            dict.fromkeys(map(sum_of, dict.fromkeys(frozenset(n.items()) for n in by_host)))
        ),
        n_intra=len(chain) - n_inter,
        n_inter=n_inter,
        n_peers=max(one.n_peers for one in every),
    )


class _Counted(NamedTuple):
    work: StepCounts
    n_scratch: int
    n_peers: int
    """The number of other hosts that the rank both sends to and receives from."""


def _of_levels(algorithm: Algorithm, hosts: tuple[int, ...]) -> Iterator[tuple[int, _Counted]]:
    """Yield the counts of all ranks of a hierarchy: equal places on both levels mean equal work."""
    assert algorithm.levels is not None
    local, across = algorithm.levels
    teams, size = teams_of(local, hosts), len(hosts)
    known: dict[tuple[int, int, int], _Counted] = {}
    for host, team in enumerate(teams):
        n_ranks, far = len(team.ranks), across.alike_rule(host, len(teams)).rank
        # If all chunks have equally many rails, ranks with the same steps own equally many.
        is_even = team.n_rails % len(team.owned) == 0
        near = _places_alike(local, n_ranks) if is_even else range(n_ranks)
        for place, rank in zip(near, team.ranks, strict=True):
            key = n_ranks, place, far
            if key not in known:
                traffic = Traffic.of(algorithm.steps(rank, size, 0, hosts))
                work = traffic.work([peer for peer in traffic.peers if hosts[peer] == host])
                away = ({hosts[p] for p in of} - {host} for of in (traffic.to, traffic.source))
                n_scratch = len(algorithm.scratch(rank, size, hosts))
                known[key] = _Counted(work, n_scratch, min(map(len, away)))
            yield rank, known[key]


@functools.lru_cache(maxsize=64)
def _places_alike(local: Algorithm, n_ranks: int) -> tuple[int, ...]:
    """Return the rank that stands in for each rank of a host."""
    return tuple(local.alike_rule(place, n_ranks).rank for place in range(n_ranks))


def _flat(algorithm: Algorithm, hosts: tuple[int, ...]) -> Iterator[tuple[int, _Counted]]:
    """Yield the counts of all ranks of an algorithm without levels."""
    size, n_ranks = len(hosts), Counter(hosts)
    alike: dict[int, _Alike] = {}
    for rank in range(size):
        one = algorithm.alike_rule(rank, size)
        if one.rank not in alike:
            traffic = Traffic.of(algorithm.steps(one.rank, size, 0, hosts))
            n_scratch = len(algorithm.scratch(one.rank, size, hosts))
            alike[one.rank] = _Alike(traffic, n_scratch, hosts, n_ranks)
        yield rank, alike[one.rank].counted(rank, one)


class _Alike:
    """The ranks of one stand-in, and the counts by the peers that share their host."""

    def __init__(
        self, traffic: Traffic, n_scratch: int, hosts: tuple[int, ...], n_ranks: Mapping[int, int]
    ) -> None:
        self._traffic, self._n_scratch = traffic, n_scratch
        self._hosts, self._n_ranks = hosts, n_ranks
        self._to, self._source = traffic.to, traffic.source
        self._is_both_ways = self._to == self._source
        self._peers = tuple(traffic.peers)
        self._by_host = defaultdict[int, list[int]](list)
        for peer in self._peers:
            self._by_host[hosts[peer]].append(peer)
        # If all peers are near, or all are far, or all kinds of messages go to all peers, only the
        # number of peers on the host matters.
        self._is_plain = len(n_ranks) in (1, len(hosts)) or all(
            len(one.peers) == len(hosts) - 1 for one in (*traffic.sends, *traffic.receives)
        )
        self._known: dict[int | tuple[int, ...], _Counted] = {}

    def counted(self, rank: int, one: StandIn) -> _Counted:
        """Return the counts of one rank."""
        here = self._hosts[rank]
        if self._is_plain:
            n_here, n_others = self._n_ranks[here], len(self._n_ranks) - 1
            if n_here not in self._known:
                n_peers = min(len(self._to), len(self._source), n_others)
                self._known[n_here] = self._with(self._peers[: n_here - 1], n_peers)
            return self._known[n_here]
        if one.is_swap and self._is_both_ways:
            near, n_peers = self._swapped(rank, one.rank)
        else:
            host_of = {peer: self._hosts[one.rename(peer)] for peer in self._peers}
            near = tuple(peer for peer, host in host_of.items() if host == here)
            ways = (self._to,) if self._is_both_ways else (self._to, self._source)
            n_peers = min(len({host_of[peer] for peer in way} - {here}) for way in ways)
        key = n_peers, *near
        if key not in self._known:
            self._known[key] = self._with(near, n_peers)
        return self._known[key]

    def _with(self, near: Collection[int], n_peers: int) -> _Counted:
        return _Counted(self._traffic.work(near), self._n_scratch, n_peers)

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
