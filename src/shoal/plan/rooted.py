"""What broadcast, reduce, gather and scatter cost.

M: bytes of the buffer; b: of one rank's block. n, r, h: ranks, ranks on a host, hosts. near = r-1
and far = n-r: the root's peers on its host and elsewhere. How bytes of memory are counted: see
`blocks`. The root is taken to be on the fullest host.
"""

from __future__ import annotations

from shoal.plan.blocks import ring_all_gather
from shoal.plan.site import INCAST, Load, Site


def direct_broadcast(n_bytes: float, site: Site) -> Load:
    """1 round: the root sends M to n-1 ranks: one copy for its host and one for each far rank."""
    near, far = site.near, site.far
    hop = site.hop(n_bytes)
    sent = (near > 0) + far
    return site.load(
        n_bytes,
        path=hop,
        fill=hop,
        ends=(near, far),
        memory=sent * n_bytes,
        cable=far * n_bytes,
        host=(2 * near, far, (sent + near) * n_bytes),
    )


def binomial_broadcast(n_bytes: float, site: Site) -> Load:
    """ceil(log2 n) rounds: who has M sends it on; the root sends it in every round.

    Cable: the root's host sends M once for each round that leaves it.
    """
    rounds, near_rounds = (site.size - 1).bit_length(), site.near_rounds
    far_rounds = rounds - near_rounds
    hop = site.hop(n_bytes)
    sent = (near_rounds > 0) + far_rounds
    return site.load(
        n_bytes,
        path=site.hops(near_rounds, far_rounds, n_bytes),
        fill=site.hops(near_rounds, far_rounds, n_bytes) - hop * (rounds > 0),
        ends=(near_rounds, far_rounds),
        memory=sent * n_bytes,
        cable=far_rounds * n_bytes * (1 if site.in_blocks else site.here),
        host=(2 * site.near, far_rounds, (sent + 2 * site.near) * n_bytes),
    )


def chain_broadcast(n_bytes: float, site: Site) -> Load:
    """n-1 rounds of M, each rank passes it on: M once in and once out of every rank.

    Cable: the edges of the ring that leave a host carry M each.
    """
    n = site.size
    far = site.crossings * (n - 1) / n
    path = site.hops(n - 1 - far, far, n_bytes)
    return site.load(
        n_bytes,
        path=path,
        fill=path - site.hop(n_bytes),
        ends=(2 * (site.exits == 0), 2 * (site.exits > 0)),
        memory=2 * n_bytes,
        cable=site.exits * n_bytes,
        host=(2 * site.near, 2 * site.exits, 2 * site.here * n_bytes),
    )


def scatter_gather_broadcast(n_bytes: float, site: Site) -> Load:
    """The root deals out shards of M/n, and a ring all-gathers them."""
    shard = n_bytes / site.size
    return direct_scatter(shard, site).then(ring_all_gather(shard, site))


def direct_reduce(n_bytes: float, site: Site) -> Load:
    """1 round: n-1 ranks send M to the root, which folds them."""
    n, near, far = site.size, site.near, site.far
    hop = site.hop(n_bytes)
    return site.load(
        n_bytes,
        path=hop,
        fill=hop,
        ends=(near, far),
        memory=(n - 1) * n_bytes,
        cable=far * n_bytes * INCAST,
        host=(2 * near, far, (n - 1 + near) * n_bytes),
    )


def binomial_reduce(n_bytes: float, site: Site) -> Load:
    """ceil(log2 n) rounds: the broadcast backwards; inner ranks fold into a copy of theirs."""
    rounds = (site.size - 1).bit_length()
    copied = Load(rounds * site.copy(n_bytes), 0.0, 0.0, *_copies(site, n_bytes))
    return binomial_broadcast(n_bytes, site).then(copied)


def chain_reduce(n_bytes: float, site: Site) -> Load:
    """n-1 rounds of M towards the root; every rank folds into a copy of its own."""
    copied = Load(site.size * site.copy(n_bytes), 0.0, 0.0, *_copies(site, n_bytes))
    return chain_broadcast(n_bytes, site).then(copied)


def _copies(site: Site, n_bytes: float) -> tuple[float, float]:
    """What it takes of a rank, and of a host, that every rank copies its buffer."""
    load = site.load(n_bytes, path=0.0, fill=0.0, ends=(0, 0), memory=n_bytes)
    return load.rank, load.host


def scatter_gather_reduce(n_bytes: float, site: Site) -> Load:
    """The scatter + all-gather broadcast backwards: a reduce-scatter, and a gather by the root."""
    return scatter_gather_broadcast(n_bytes, site).then(
        Load(site.size * site.copy(n_bytes / site.size), 0.0, 0.0, *_copies(site, n_bytes))
    )


def direct_scatter(n_bytes: float, site: Site) -> Load:
    """1 round: the root sends each of n-1 ranks its b, and copies its own."""
    n, near, far = site.size, site.near, site.far
    hop = site.hop(n_bytes)
    return site.load(
        n_bytes,
        path=hop,
        fill=hop,
        ends=(near, far),
        memory=n * n_bytes,
        cable=far * n_bytes,
        host=(2 * near, far, (n + near) * n_bytes),
    )


def direct_gather(n_bytes: float, site: Site) -> Load:
    """1 round: n-1 ranks send the root their b; it copies its own."""
    scattered = direct_scatter(n_bytes, site)
    return scattered._replace(wire=scattered.wire * INCAST)


def binomial_scatter(n_bytes: float, site: Site) -> Load:
    """ceil(log2 n) rounds: half of the blocks that one holds go to whoever deals them out further.

    Each block is a message of its own: the root sends n-1 of them all the same, and others pass
    them on.
    Memory of the root: n blocks sent or copied; of the host, each block once per round.
    """
    n, near, far = site.size, site.near, site.far
    rounds, near_rounds = (n - 1).bit_length(), site.near_rounds
    passed = site.here * near_rounds / 2
    return site.load(
        n_bytes,
        path=site.hops(near_rounds, rounds - near_rounds, n_bytes),
        fill=site.hop(n_bytes),
        ends=(near, far),
        memory=n * n_bytes,
        cable=far * n_bytes,
        host=(2 * passed, far, (n + 2 * passed) * n_bytes),
    )


def binomial_gather(n_bytes: float, site: Site) -> Load:
    """The binomial scatter backwards."""
    return binomial_scatter(n_bytes, site)
