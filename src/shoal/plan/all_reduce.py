"""What each all-reduce costs.

M: bytes of the buffer. n, r, h: ranks, ranks on a host, hosts. near = r-1 and far = n-r: a rank's
peers on its host and elsewhere. How memory is counted: see `blocks`.
"""

from __future__ import annotations

from collections.abc import Callable

from shoal.plan.blocks import ring_load
from shoal.plan.site import Load, Site
from shoal.schedule.stripes import n_stripes_of

Formula = Callable[[float, Site], Load]


def direct(n_bytes: float, site: Site) -> Load:
    """1 round: M to n-1 peers. Cable: r ranks send M to `far` peers.

    Memory: (n-1)M folded, the own M into scratch, and the result back; M of scratch.
    """
    n, near, far = site.size, site.near, site.far
    hop = site.hop(n_bytes)
    return site.load(
        n_bytes,
        path=(hop + 2 * site.copy(n_bytes), site.wait),
        ends=(2 * near, 2 * far),
        memory=(near > 0, n + 1 + far),
        cable=(site.here * far, site.lost_to_all),
        scratch=1,
    )


def sharded(n_bytes: float, site: Site) -> Load:
    """`sharded_by_all`, or with as many stripes and reducers as a short buffer has."""
    n_stripes = n_stripes_of(int(n_bytes), site.size)
    if n_stripes < site.size:
        return sharded_among(n_stripes)(n_bytes, site)
    return sharded_by_all(n_bytes, site)


def sharded_by_all(n_bytes: float, site: Site) -> Load:
    """2 rounds: M/n to each of n-1 reducers, and M/n of result to each of n-1 workers.

    Cable: r ranks send two shards to `far` peers.
    Memory: n-1 shards sent, n-1 folded; one result sent, n-1 stored.
    """
    n, near, far, shard = site.size, site.near, site.far, n_bytes / site.size
    hop = site.hop(shard)
    return site.load(
        shard,
        path=(2 * hop, site.wait),
        ends=(4 * near, 4 * far),
        memory=(near + (near > 0), 2 * (n - 1) + 2 * far),
        cable=(2 * site.here * far, site.lost_to_all),
    )


def sharded_among(n_reducers: int) -> Formula:
    """`sharded` with k reducers, spread evenly over the ranks: each has some of the s stripes."""

    def formula(n_bytes: float, site: Site) -> Load:
        """2 rounds: s stripes to their reducers, and s stripes of result to each of n-1 workers.

        Of a host with q = ceil(k/h) reducers of m = ceil(s/k) stripes each. Cable: r ranks send to
        the k-q reducers elsewhere, q reducers to the `far` workers. Memory: a reducer's own part of
        all its stripes but the first goes into scratch and is folded from there.
        """
        n_stripes = n_stripes_of(int(n_bytes), site.size)
        n, near, far, here, k = (
            site.size,
            site.near,
            site.far,
            site.here,
            min(n_reducers, n_stripes),
        )
        stripe, m, q = n_bytes / n_stripes, -(-n_stripes // k), min(here, -(-k // site.n_hosts))
        hop = site.hop(stripe)
        # A stripe of one segment is all there before any of its result leaves.
        queued = max(0, m * q * far - 1) * site.passing(stripe)
        worker = (2 * (q - 1), 2 * (k - q), q - 1, k - 1 + k - q)
        reducer = (2 * near, 2 * far, near > 0, n - 1 + far + 2 * (m - 1) / m)
        busiest = [a + b for a, b in zip(worker, reducer, strict=True)]
        others = (2 * q, 2 * (k - q), q, k + k - q)
        host = [q * a + (here - q) * b for a, b in zip(busiest, others, strict=True)]
        host = [n_stripes / k * count for count in host]
        return site.load(
            stripe,
            path=(2 * hop + 2 * queued, site.wait),
            ends=(m * busiest[0], m * busiest[1]),
            memory=(m * busiest[2], m * busiest[3]),
            cable=(n_stripes / k * (q * far + here * (k - q)), site.lost_to_all),
            scratch=m - 1,
            host=(host[0], host[1], host[2], host[3]),
        )

    return formula


def ring(n_bytes: float, site: Site) -> Load:
    """2(n-1) rounds of M/n to the right. Cable: the edges that leave a host."""
    return ring_load(n_bytes / site.size, site, 2 * (site.size - 1))


def tree(n_bytes: float, site: Site) -> Load:
    """Two binary trees, half of M in each: up ceil(log2 n) rounds, and as many down.

    A rank has two children in one tree and none in the other: 4 halves up and 4 down.
    Cable: a host with several ranks has about 3 edges to others in each tree.
    """
    depth, near, half = (site.size - 1).bit_length(), site.near_rounds, n_bytes / 2
    far, here = depth - near, site.here
    path = 2 * site.hops(near, far, half)
    fill = path - 2 * site.hop(half)
    if far and near:
        # Neither tree fits the hosts exactly.
        path = 2 * site.hops(near, far + 1, half)
        edges, of_rank = 6, 4 if site.n_hosts == 2 else 6
        inside = 8 * here - 2 * edges
        return site.load(
            half,
            path=(path, fill),
            ends=(8 - of_rank, of_rank),
            memory=(1, 7),
            cable=(edges, site.lost_to_trees),
            host=(inside, 2 * edges, inside * 3 / 8, 4 * here + edges),
        )
    ends = 8 if site.size > 2 else 4
    return site.load(
        half,
        path=(path, fill),
        ends=(0, ends) if far else (ends, 0),
        memory=(0 if far else ends * 3 / 8, ends if far else ends / 2),
        cable=(ends / 2 if far else 0.0, site.lost_to_trees),
    )


def doubling(n_bytes: float, site: Site) -> Load:
    """log2 n rounds: M exchanged with the rank 1, 2, 4, ... away, and a fold.

    Where n is no power of two, some ranks hand in before and are told after: 2 more. M of scratch.
    Cable: r ranks send M in every round that leaves the host.
    """
    near, far, extra = site.corners()
    rounds, paired_far = near + far, extra if site.size == site.n_hosts else 0
    path = site.hops(near + 2 * (extra - paired_far), far + 2 * paired_far, n_bytes)
    return site.load(
        n_bytes,
        path=(path + (rounds + 1 + extra) * site.copy(n_bytes), site.wait),
        ends=(2 * (near + extra - paired_far), 2 * (far + paired_far)),
        memory=(near + extra - paired_far, 2 * rounds + far + 0.5 + extra + paired_far),
        cable=(site.here * (far + paired_far), site.lost_to_pairs),
        scratch=1,
    )


def halving(n_bytes: float, site: Site) -> Load:
    """2 log2 n rounds: M/2, M/4, ... exchanged and folded, then the results the same way back.

    The largest with the nearest. Each of p chunks is a message of its own, p being the power of
    two; where n is none, some ranks hand in M before and are told after: 2 rounds more.
    Cable: r ranks send p/r - 1 chunks in each direction.
    """
    near_rounds, far_rounds, extra = site.corners()
    p = 1 << near_rounds + far_rounds
    chunk, far = n_bytes / p, (1 << far_rounds) - 1
    near, paired = p - 1 - far, extra * p
    paired_far = paired if site.size == site.n_hosts else 0
    path = site.hops(2 * near_rounds, 2 * far_rounds, chunk) + 2 * extra * site.hop(chunk)
    return site.load(
        chunk,
        path=(path, site.wait),
        ends=(4 * near + 2 * (paired - paired_far), 4 * far + 2 * paired_far),
        memory=(2 * near + paired - paired_far, 2 * (p - 1) + 2 * far + paired + paired_far),
        cable=(site.here * 2 * far + paired_far, site.lost_to_pairs),
    )
