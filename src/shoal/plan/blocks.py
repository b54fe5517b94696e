"""What all-gather, reduce-scatter, all-to-all and barrier cost.

b: bytes of one rank's block. n, r, h: ranks, ranks on a host, hosts. near = r-1 and far = n-r: a
rank's peers on its host and elsewhere. All counts are of blocks.

Memory: a block that is sent inside a host is copied once by its sender, however many peers read it;
each receiver stores or folds it. Between hosts it is copied once at each end, by the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.plan.site import Load, Site


def direct_all_gather(n_bytes: float, site: Site) -> Load:
    """1 round: b to n-1 peers. Cable: r ranks send b to `far` peers. Memory: the own block too."""
    n, near, far = site.size, site.near, site.far
    hop = site.hop(n_bytes)
    return site.load(
        n_bytes,
        path=(hop, site.wait),
        at_once=True,
        ends=(2 * near, 2 * far),
        memory=(near > 0, n + far),
        cable=(site.here * far, site.lost_to_all),
    )


def ring_all_gather(n_bytes: float, site: Site) -> Load:
    """n-1 rounds of b to the right. Cable: the edges that leave a host, n-1 blocks each."""
    return ring_load(n_bytes, site, site.size - 1, copied=1)


def ring_load(
    n_bytes: float, site: Site, rounds: int, *, copied: float = 0.0, scratch: float = 0.0
) -> Load:
    """Rounds in which every rank sends one block to the right and gets one from the left.

    Args:
        copied: blocks that each rank copies besides.
        scratch: blocks that it needs memory for.
    """
    far = site.crossings * rounds / site.size
    far_sent = rounds if site.exits else 0
    near_sent = 0 if site.exits == site.here else rounds
    host_far = site.exits * rounds
    host_near = site.here * rounds - host_far
    return site.load(
        n_bytes,
        path=(site.hops(rounds - far, far, n_bytes), site.wait),
        ends=(2 * rounds - far_sent, far_sent) if near_sent else (0, 2 * rounds),
        memory=(near_sent, rounds + copied + (0 if near_sent else rounds)),
        cable=(host_far, 0.0),
        scratch=scratch,
        host=(
            *(2 * host_near, 2 * host_far, host_near),
            site.here * (rounds + copied) + host_far,
        ),
    )


def bruck_all_gather(n_bytes: float, site: Site) -> Load:
    """ceil(log2 n) rounds: in round k the 2^k blocks that one holds, to the rank 2^k before.

    Each block is a message of its own: n-1 in all, as in `direct`, but one after another.
    Cable: of the 2^k ranks at a host's edge in the near rounds, of all r in the far ones.
    """
    n, near_rounds = site.size, site.near_rounds
    rounds = (n - 1).bit_length()
    near = min((1 << near_rounds) - 1, n - 1)
    far = n - 1 - near
    crossing = sum(4**k for k in range(near_rounds)) if site.n_hosts > 1 else 0
    return site.load(
        n_bytes,
        path=(site.hops(near_rounds, rounds - near_rounds, n_bytes), site.wait),
        ends=site.at_edge(near, far),
        memory=(near, n + far),
        cable=(site.here * far + crossing, site.lost_to_pairs),
    )


def direct_reduce_scatter(n_bytes: float, site: Site) -> Load:
    """1 round: n-1 peers get their blocks. Cable: r ranks send b to `far` peers."""
    n, near, far = site.size, site.near, site.far
    hop = site.hop(n_bytes)
    return site.load(
        n_bytes,
        path=(site.copy(n_bytes) + hop, site.wait),
        at_once=True,
        ends=(2 * near, 2 * far),
        memory=(near, n + far),
        cable=(site.here * far, site.lost_to_all),
    )


def ring_reduce_scatter(n_bytes: float, site: Site) -> Load:
    """n-1 rounds of b to the right, each copied to scratch before something is folded into it."""
    rounds = site.size - 1
    load = ring_load(n_bytes, site, rounds, copied=rounds, scratch=min(2, rounds - 1))
    return load._replace(path=load.path + site.copy(n_bytes))


def pairwise_all_to_all(n_bytes: float, site: Site) -> Load:
    """n-1 exchanges of b, none of which waits for another, no two ranks sending to one at a time.

    Cable: r ranks send b to `far` peers.
    """
    n, near, far = site.size, site.near, site.far
    hop = site.hop(n_bytes)
    return site.load(
        n_bytes,
        path=(hop, site.wait),
        at_once=True,
        ends=(2 * near, 2 * far),
        memory=(near, n + far),
        cable=(site.here * far, site.lost_to_all),
    )


def bruck_all_to_all(n_bytes: float, site: Site) -> Load:
    """ceil(log2 n) rounds of about n/2 blocks to the rank 2^k away, each a message of its own.

    A block is sent once for each bit of its distance, and stays in scratch between.
    """
    n, near_rounds = site.size, site.near_rounds
    rounds = (n - 1).bit_length()
    in_round = [sum(1 for j in range(1, n) if j >> k & 1) for k in range(rounds)]
    near, far = sum(in_round[:near_rounds]), sum(in_round[near_rounds:])
    crossing = sum(m << k for k, m in enumerate(in_round[:near_rounds]))
    scratch = sum(min(2, j.bit_count() - 1) for j in range(1, n))
    return site.load(
        n_bytes,
        path=(site.hops(near_rounds, rounds - near_rounds, n_bytes), site.wait),
        ends=site.at_edge(near, far),
        memory=(near, 1 + near + 2 * far),
        cable=(site.here * far + (crossing if site.n_hosts > 1 else 0), site.lost_to_pairs),
        scratch=scratch,
    )


def dissemination(n_bytes: float, site: Site) -> Load:
    """ceil(log2 n) rounds of one message to the rank 2^k away, and a fold."""
    rounds, near = (site.size - 1).bit_length(), site.near_rounds
    far = rounds - near
    return site.load(
        n_bytes,
        path=(site.hops(near, far, n_bytes) + rounds * site.copy(n_bytes), site.wait),
        ends=site.at_edge(near, far),
        memory=(near, 2 * rounds + far),
        cable=(site.here * far + ((1 << near) - 1 if site.n_hosts > 1 else 0), site.lost_to_pairs),
    )
