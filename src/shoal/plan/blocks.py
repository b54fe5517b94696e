"""What all-gather, reduce-scatter, all-to-all and barrier cost.

b: bytes of one rank's block. n, r, h: ranks, ranks on a host, hosts. near = r-1 and far = n-r: a
rank's peers on its host and elsewhere. A byte that is sent inside a host is copied once by its
sender, however many peers are sent the same, and once more, or folded, by each receiver; between
hosts it is copied once at each end.
"""

from __future__ import annotations

from shoal.plan.site import INCAST, Load, Site


def direct_all_gather(n_bytes: float, site: Site) -> Load:
    """1 round: b to n-1 peers.

    Memory: n-1 blocks and the own one stored; one copy to send, and one for each far peer.
    Cable: r ranks send b to `far` peers.
    """
    n, near, far = site.size, site.near, site.far
    hop = site.hop(n_bytes)
    return site.load(
        n_bytes,
        path=hop,
        fill=hop,
        ends=(2 * near, 2 * far),
        memory=(n + (near > 0) + far) * n_bytes,
        cable=site.here * far * n_bytes * INCAST,
    )


def ring_all_gather(n_bytes: float, site: Site) -> Load:
    """n-1 rounds of b to the right; a block crosses each edge of the ring but one.

    Memory: n-1 blocks and the own one stored, n-1 copied to send.
    Cable: the edges that leave a host carry n-1 blocks each.
    """
    n = site.size
    far_hops = site.crossings * (n - 1) / n
    far_ends = 2 * (n - 1) if site.exits else 0
    near_ends = 2 * (n - 1) - far_ends
    return site.load(
        n_bytes,
        path=site.hops(n - 1 - far_hops, far_hops, n_bytes),
        fill=site.hop(n_bytes),
        ends=(near_ends, far_ends),
        memory=(2 * n - 1) * n_bytes,
        cable=site.exits * (n - 1) * n_bytes,
        host=ring_host(site, n - 1, n_bytes),
    )


def ring_host(site: Site, rounds: float, n_bytes: float) -> tuple[float, float, float]:
    """Ends and memory of a host's ranks in a ring, of which `exits` edges lead out and in."""
    far_ends = 2 * site.exits * rounds
    near_ends = 2 * site.here * rounds - far_ends
    return near_ends, far_ends, 2 * site.here * rounds * n_bytes


def bruck_all_gather(n_bytes: float, site: Site) -> Load:
    """ceil(log2 n) rounds: in round k the 2^k blocks that one holds, to the rank 2^k before.

    Each block is a message of its own: n-1 in all, as in `direct`, but one after another.
    Memory: n-1 blocks and the own one stored; n-1 copied to send.
    Cable: of the 2^k ranks nearest to a host's edge in the near rounds, of all r in the far ones.
    """
    n, near_rounds = site.size, site.near_rounds
    rounds = (n - 1).bit_length()
    near_blocks = min((1 << near_rounds) - 1, n - 1)
    far_blocks = n - 1 - near_blocks
    crossing = sum(4**k for k in range(near_rounds)) if site.n_hosts > 1 else 0
    return site.load(
        n_bytes,
        path=site.hops(near_rounds, rounds - near_rounds, n_bytes),
        fill=site.hop(n_bytes),
        ends=(2 * near_blocks, 2 * far_blocks),
        memory=(2 * n - 1) * n_bytes,
        cable=(site.here * far_blocks + crossing) * n_bytes,
    )


def direct_reduce_scatter(n_bytes: float, site: Site) -> Load:
    """1 round: n-1 peers get their blocks.

    Memory: the own block copied, n-1 folded, n-1 copied to send.
    Cable: r ranks send b to `far` peers.
    """
    n = site.size
    hop = site.hop(n_bytes)
    return site.load(
        n_bytes,
        path=hop,
        fill=hop,
        ends=(2 * site.near, 2 * site.far),
        memory=(2 * n - 1) * n_bytes,
        cable=site.here * site.far * n_bytes * INCAST,
    )


def ring_reduce_scatter(n_bytes: float, site: Site) -> Load:
    """n-1 rounds of b to the right: partial sums, as in the first half of the ring all-reduce.

    Memory: n-1 blocks copied to scratch, folded, and copied to send.
    Cable: the edges that leave a host carry n-1 blocks each.
    """
    n = site.size
    far_hops = site.crossings * (n - 1) / n
    far_ends = 2 * (n - 1) if site.exits else 0
    near, far, memory = ring_host(site, n - 1, n_bytes)
    copied = (n - 1) * n_bytes
    return site.load(
        n_bytes,
        path=site.hops(n - 1 - far_hops, far_hops, n_bytes) + (n - 1) * site.copy(n_bytes),
        fill=site.hop(n_bytes),
        ends=(2 * (n - 1) - far_ends, far_ends),
        memory=3 * copied,
        cable=site.exits * (n - 1) * n_bytes,
        host=(near, far, memory + site.here * copied),
    )


def halving_reduce_scatter(n_bytes: float, site: Site) -> Load:
    """log2 n rounds: half of what is left, to the rank half as far away each time.

    n-1 blocks in all. Where n is no power of two, as many rounds as for the next one.
    Memory: the input's copy, n-1 blocks folded, n-1 copied to send.
    """
    n, near_rounds = site.size, site.near_rounds
    rounds = (n - 1).bit_length()
    near_blocks = min((1 << near_rounds) - 1, n - 1)
    far_blocks = n - 1 - near_blocks
    return site.load(
        n_bytes,
        path=site.hops(near_rounds, rounds - near_rounds, n_bytes),
        fill=site.hop(n_bytes),
        ends=(2 * near_blocks, 2 * far_blocks),
        memory=(3 * n - 2) * n_bytes,
        cable=site.here * far_blocks * n_bytes,
    )


def pairwise_all_to_all(n_bytes: float, site: Site) -> Load:
    """n-1 exchanges of b, none of which waits for another.

    Memory: the own block copied, n-1 copied to send, n-1 stored.
    Cable: r ranks send b to `far` peers, no two to one at a time.
    """
    n = site.size
    hop = site.hop(n_bytes)
    return site.load(
        n_bytes,
        path=hop,
        fill=hop,
        ends=(2 * site.near, 2 * site.far),
        memory=(2 * n - 1) * n_bytes,
        cable=site.here * site.far * n_bytes,
    )


def bruck_all_to_all(n_bytes: float, site: Site) -> Load:
    """ceil(log2 n) rounds of about n/2 blocks to the rank 2^k away, each a message.

    Memory: a block is sent and stored once for each bit of its distance, and copied at both ends.
    """
    n, near_rounds = site.size, site.near_rounds
    rounds = (n - 1).bit_length()
    sent = sum(k.bit_count() for k in range(1, n))
    near = sent * near_rounds / max(1, rounds)
    return site.load(
        n_bytes,
        path=site.hops(near_rounds, rounds - near_rounds, n_bytes),
        fill=site.hop(n_bytes),
        ends=(2 * near, 2 * (sent - near)),
        memory=(2 * sent + 2 * n) * n_bytes,
        cable=site.here * (sent - near) * n_bytes,
    )


def dissemination(n_bytes: float, site: Site) -> Load:
    """ceil(log2 n) rounds of one message to the rank 2^k away."""
    rounds, near_rounds = (site.size - 1).bit_length(), site.near_rounds
    far_rounds = rounds - near_rounds
    return site.load(
        n_bytes,
        path=site.hops(near_rounds, far_rounds, n_bytes),
        fill=site.hop(n_bytes),
        ends=(2 * near_rounds, 2 * far_rounds),
        memory=3 * rounds * n_bytes,
        cable=site.here * far_rounds * n_bytes,
    )
