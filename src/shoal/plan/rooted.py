"""What broadcast, reduce, gather and scatter cost.

M: bytes of the buffer; b: of one rank's block. n, r, h: ranks, ranks on a host, hosts. near = r-1
and far = n-r: the root's peers on its host and elsewhere. The root is taken to be on the fullest
host, and the first of it. How memory is counted: see `blocks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.plan.blocks import ring_load

if TYPE_CHECKING:
    from shoal.plan.site import Load, Site


def direct_broadcast(n_bytes: float, site: Site) -> Load:
    """1 round: the root sends M to n-1 ranks: one copy for its host and one for each far rank."""
    near, far = site.near, site.far
    hop = site.hop(n_bytes)
    return site.load(
        n_bytes,
        path=(hop, site.wait + site.end(n_bytes)),
        ends=(near, far),
        memory=(near > 0, far),
        cable=(far, 0.0),
        host=(2 * near, far, near > 0, far + near),
    )


def binomial_broadcast(n_bytes: float, site: Site) -> Load:
    """ceil(log2 n) rounds: who has M sends it on, the root in every round.

    Cable: the root's host sends M in each round that leaves it.
    """
    near, rounds = site.near_rounds, (site.size - 1).bit_length()
    far, path = rounds - near, site.hops(near, rounds - near, n_bytes)
    inner = (site.here + 1) // 2  # of a tree on a host, those who send
    return site.load(
        n_bytes,
        path=(path, path - site.hop(n_bytes)),
        ends=(near, far),
        memory=(near > 0, max(far, near > 1)),
        cable=(far * (1 if site.in_blocks else site.here), site.lost_to_pairs),
        host=(2 * site.near, far, inner * (near > 0), far + site.near),
    )


def chain_broadcast(n_bytes: float, site: Site) -> Load:
    """n-1 rounds of M: once into and once out of every rank. Cable: the edges that leave a host."""
    n, here, exits = site.size, site.here, site.exits
    far = site.crossings * (n - 1) / n
    path = site.hops(n - 1 - far, far, n_bytes)
    all_far, ends = exits == here, min(2, n - 1)
    return site.load(
        n_bytes,
        path=(path, path - site.hop(n_bytes)),
        ends=(0, ends) if all_far else (ends, 0) if not exits else (1, 1),
        memory=(not all_far, ends if all_far else ends - 1),
        cable=(exits, 0.0),
        host=(
            2 * (here - max(1, exits)),
            2 * exits,
            here - max(1, exits),
            here - (not exits) + exits,
        ),
    )


def scatter_gather_broadcast(n_bytes: float, site: Site) -> Load:
    """A binomial scatter of shards of M/n, and a ring that all-gathers them."""
    if site.size == 2:
        return direct_broadcast(n_bytes, site._replace(pieces=2))
    shard = n_bytes / site.size
    passed_on = ring_load(shard, site, site.size)
    # What a rank gets in the scatter it does not get again in the ring, which begins meanwhile.
    scattered = binomial_scatter(shard, site)
    return passed_on._replace(
        path=passed_on.path + _behind(site, shard), wire=passed_on.wire + scattered.wire
    )


def direct_reduce(n_bytes: float, site: Site) -> Load:
    """1 round: n-1 ranks send M to the root, which folds them."""
    n, near, far = site.size, site.near, site.far
    hop = site.hop(n_bytes)
    return site.load(
        n_bytes,
        path=(hop, site.wait + site.end(n_bytes)),
        ends=(near, far),
        memory=(0, n - 1),
        cable=(far, site.lost_to_all),
        host=(2 * near, far, near, n - 1),
    )


def binomial_reduce(n_bytes: float, site: Site) -> Load:
    """ceil(log2 n) rounds: the broadcast backwards; inner ranks fold into a copy of theirs.

    The root folds M in every round.
    """
    near, rounds = site.near_rounds, (site.size - 1).bit_length()
    far, path = rounds - near, site.hops(near, rounds - near, n_bytes)
    inner = max(site.here // 2 - (site.n_hosts == 1), site.here == 1 and rounds > 1)
    return site.load(
        n_bytes,
        path=(path + site.copy(n_bytes), path - site.hop(n_bytes)),
        scratch=site.size > 3,
        ends=(near, far),
        memory=(0, rounds + (rounds > 1)),
        cable=(far * (1 if site.in_blocks else site.here), site.lost_to_pairs),
        host=(2 * site.near, far, site.near, far + site.near + inner),
    )


def chain_reduce(n_bytes: float, site: Site) -> Load:
    """n-1 rounds of M towards the root; every rank but the ends folds into a copy of its own."""
    load = chain_broadcast(n_bytes, site)
    inner = max(0, site.here - 2 // site.n_hosts)
    copied = site.load(
        n_bytes,
        path=(site.copy(n_bytes), 0.0),
        ends=(0, 0),
        memory=(0, min(1, inner)),
        scratch=site.size > 2,
        host=(0, 0, 0, inner),
    )
    return load.then(copied)


def scatter_gather_reduce(n_bytes: float, site: Site) -> Load:
    """2 rounds: M/n to each of n-1 reducers, and M/n of result from each to the root.

    Cable: the shards that r ranks send to `far` peers, and at the root's host as many again.
    """
    n, near, far, here = site.size, site.near, site.far, site.here
    shard = n_bytes / n
    hop = site.hop(shard)
    return site.load(
        shard,
        path=(site.copy(shard) + 2 * hop, site.wait),
        ends=(3 * near, 3 * far),
        memory=(near, 2 * (n - 1) + far + (n == 2)),
        cable=((here + 1) * far, site.lost_to_all),
        scratch=1,
        host=(
            2 * here * near + 2 * near,
            2 * here * far + far,
            here * near + near,
            here * (n - 1 + far) + near + n - 1,
        ),
    )


def direct_scatter(n_bytes: float, site: Site) -> Load:
    """1 round: the root sends each of n-1 ranks its b, and copies its own."""
    near, far = site.near, site.far
    hop = site.hop(n_bytes)
    return site.load(
        n_bytes,
        path=(hop, site.wait + site.end(n_bytes)),
        ends=(near, far),
        memory=(near, 1 + far),
        cable=(far, site.lost_to_all),
        host=(2 * near, far, near, 1 + far + near),
    )


def direct_gather(n_bytes: float, site: Site) -> Load:
    """1 round: n-1 ranks send the root their b; it copies its own."""
    n, near, far = site.size, site.near, site.far
    hop = site.hop(n_bytes)
    return site.load(
        n_bytes,
        path=(hop, site.wait + site.end(n_bytes)),
        ends=(near, far),
        memory=(0, n),
        cable=(far, site.lost_to_all),
        host=(2 * near, far, near, n),
    )


def binomial_scatter(n_bytes: float, site: Site) -> Load:
    """ceil(log2 n) rounds: half of the blocks that one holds go to whoever deals them out further.

    Each block is a message of its own: the root sends n-1 of them all the same, and others pass
    them on, on its host r/2 in each near round.
    """
    near, far = site.near, site.far
    passed_on = site.here / 2 * site.near_rounds
    return site.load(
        n_bytes,
        path=(_in_turn(site, n_bytes), site.wait),
        ends=(near, far),
        memory=(near, 1 + far),
        cable=(far, site.lost_to_pairs),
        scratch=_passed_on(site.size),
        host=(2 * passed_on, far, passed_on, 1 + far + passed_on),
    )


def binomial_gather(n_bytes: float, site: Site) -> Load:
    """The scatter backwards: r/2 blocks in each near round on the root's host, n-1 to the root."""
    n, near, far = site.size, site.near, site.far
    passed_on = site.here / 2 * site.near_rounds
    return site.load(
        n_bytes,
        path=(_in_turn(site, n_bytes), site.wait),
        ends=(near, far),
        memory=(0, n),
        cable=(far, site.lost_to_pairs),
        scratch=_passed_on(n),
        host=(2 * passed_on, far, passed_on, 1 + far + passed_on),
    )


def _passed_on(size: int) -> int:
    """How many blocks of others the largest subtree below the root holds."""
    if size == 1:
        return 0
    top = 1 << (size - 1).bit_length() - 1
    return max(top // 2, size - top) - 1


def _in_turn(site: Site, n_bytes: float) -> float:
    """The way of the last block through all rounds of a tree, behind the others to its subtree."""
    near, rounds = site.near_rounds, (site.size - 1).bit_length()
    return site.hops(near, rounds - near, n_bytes) + _behind(site, n_bytes)


def _behind(site: Site, n_bytes: float) -> float:
    """What a block waits for those that a rank sends before it, over all rounds of a tree."""
    return max(0, site.size - 1 - (site.size - 1).bit_length()) * site.end(n_bytes)
