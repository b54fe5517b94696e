"""What each all-reduce costs.

M: bytes of the buffer. n, r, h: ranks, ranks on a host, hosts. near = r-1 and far = n-r: a rank's
peers on its host and elsewhere. How bytes of memory are counted: see `blocks`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from shoal.plan.blocks import ring_host
from shoal.plan.site import INCAST, Load, Site

Formula = Callable[[float, Site], Load]


def direct(n_bytes: float, site: Site) -> Load:
    """1 round: M to n-1 peers.

    Memory: (n-1)M folded, M into scratch and M back, one copy to send, and one for each far peer.
    Cable: r ranks send M to `far` peers.
    """
    n, near, far = site.size, site.near, site.far
    hop = site.hop(n_bytes)
    return site.load(
        n_bytes,
        path=hop + 2 * site.copy(n_bytes),
        fill=hop,
        ends=(2 * near, 2 * far),
        memory=(n + 1 + (near > 0) + far) * n_bytes,
        cable=site.here * far * n_bytes * INCAST,
    )


def sharded(n_bytes: float, site: Site) -> Load:
    """2 rounds: M/n to each of n-1 reducers, and M/n of result to each of n-1 workers.

    Memory: n-1 shards copied to send, n-1 folded, n-1 results stored; of the own result one copy
    to send, and one for each far worker.
    Cable: r ranks send 2M/n to `far` peers.
    """
    n, near, far, shard = site.size, site.near, site.far, n_bytes / site.size
    hop = site.hop(shard)
    return site.load(
        shard,
        path=2 * hop,
        fill=hop,
        ends=(4 * near, 4 * far),
        memory=(3 * (n - 1) + (near > 0) + far) * shard,
        cable=2 * site.here * far * shard * INCAST,
    )


def sharded_among(n_reducers: int) -> Formula:
    """`sharded` with k reducers, spread over the hosts: shards of M/k."""

    def formula(n_bytes: float, site: Site) -> Load:
        """2 rounds: M/k to each of k reducers, and M/k of result to each of n-1 workers.

        Memory of a reducer: what it sends to the others and gets from them, k-1 shards each way;
        n-1 shards folded; its result sent as in `sharded`.
        Cable: of a host with k/h reducers, r workers: each of those serves `far` workers, each of
        these the other hosts' reducers.
        """
        n, far, k = site.size, site.far, n_reducers
        shard, k_here = n_bytes / k, math.ceil(k / site.n_hosts)
        is_near = site.near / max(1, n - 1)
        hop = site.hop(shard)
        worker_ends, reducer_ends = 2 * (k - 1), 2 * (n - 1)
        ends = worker_ends + reducer_ends
        reducer = (n - 1 + (site.near > 0) + far) * shard
        worker = 2 * (k - 1) * shard
        host_ends = site.here * 2 * k + k_here * reducer_ends
        return site.load(
            shard,
            path=2 * hop,
            fill=hop,
            ends=(ends * is_near, ends * (1 - is_near)),
            memory=worker + reducer,
            cable=(k_here * far + site.here * (k - k_here)) * shard * INCAST * (site.n_hosts > 1),
            host=(
                host_ends * is_near,
                host_ends * (1 - is_near),
                site.here * 2 * k * shard + k_here * reducer,
            ),
        )

    return formula


def ring(n_bytes: float, site: Site) -> Load:
    """2(n-1) rounds of M/n to the right.

    Memory: 2(n-1) chunks copied to send, as many folded or stored.
    Cable: the edges that leave a host carry 2(n-1) chunks each.
    """
    n, chunk = site.size, n_bytes / site.size
    rounds = 2 * (n - 1)
    far_hops = site.crossings * rounds / n
    far_ends = 2 * rounds if site.exits else 0
    return site.load(
        chunk,
        path=site.hops(rounds - far_hops, far_hops, chunk),
        fill=site.hop(chunk),
        ends=(2 * rounds - far_ends, far_ends),
        memory=2 * rounds * chunk,
        cable=site.exits * rounds * chunk,
        host=ring_host(site, rounds, chunk),
    )


def tree(n_bytes: float, site: Site) -> Load:
    """Two binary trees, half of M in each: up ceil(log2 n) rounds, and as many down.

    A rank has two children in one tree and none in the other.
    Memory, of halves: 2 copied to send up and 2 folded, 2 stored and 1 copied to send down to both.
    Cable: a host's ranks have together no more edges to others than one rank has, and as many
    again where the tree's order does not match the hosts.
    """
    depth, near_rounds, half = (site.size - 1).bit_length(), site.near_rounds, n_bytes / 2
    far_rounds = depth - near_rounds
    hop = site.hop(half)
    near, far = (0, 8) if far_rounds else (8, 0)
    edges = 4 if site.here == 1 else 6
    return site.load(
        half,
        path=2 * site.hops(near_rounds, far_rounds, half),
        fill=2 * site.hops(near_rounds, far_rounds, half) - 2 * hop,
        ends=(near, far),
        memory=7 * half,
        cable=edges * half if far_rounds else 0.0,
    )


def doubling(n_bytes: float, site: Site) -> Load:
    """log2 n rounds: M exchanged with the rank 1, 2, 4, ... away.

    Where n is no power of two, the ranks beyond it hand in before and are told after: 2 more.
    Memory: per round M copied to send and M folded.
    Cable: r ranks send M in every round that leaves the host.
    """
    n = site.size
    rounds, near_rounds = n.bit_length() - 1, min(site.near_rounds, n.bit_length() - 1)
    extra = 2 * (n & (n - 1) > 0)
    far_rounds = rounds - near_rounds
    far_extra = extra if site.n_hosts > 1 else 0
    near, far = near_rounds + extra - far_extra, far_rounds + far_extra
    return site.load(
        n_bytes,
        path=site.hops(near, far, n_bytes),
        fill=site.hop(n_bytes),
        ends=(2 * near_rounds + extra - far_extra, 2 * far_rounds + far_extra),
        memory=(2 * rounds + extra) * n_bytes,
        cable=site.here * (far_rounds + far_extra / 2) * n_bytes,
    )


def halving(n_bytes: float, site: Site) -> Load:
    """2 log2 n rounds: M/2, M/4, ... exchanged and folded, then the results the same way back.

    Where n is no power of two, the ranks beyond it hand in M before and are told after.
    Memory: 2(1 - 1/p)M sent and as much received, p being the power of two.
    Cable: the rounds whose peers are not on the host, all r ranks in each.
    """
    n = site.size
    rounds, near_rounds = n.bit_length() - 1, min(site.near_rounds, n.bit_length() - 1)
    power, extra = 1 << rounds, 2 * (n & (n - 1) > 0)
    extra_far = extra if site.n_hosts > 1 else 0
    chunk = n_bytes / power
    near_chunks = (1 << near_rounds) - 1
    far_chunks = power - 1 - near_chunks
    path = sum(
        2 * site.hop(chunk * 2**k, far=k >= near_rounds and site.n_hosts > 1) for k in range(rounds)
    )
    return site.load(
        chunk,
        path=path + extra * site.hop(n_bytes),
        fill=site.hop(chunk),
        ends=(
            4 * near_chunks + (extra - extra_far) * power,
            4 * far_chunks + extra_far * power,
        ),
        memory=4 * (power - 1) * chunk + extra * n_bytes,
        cable=site.here * (2 * far_chunks * chunk + extra_far / 2 * n_bytes),
    )
