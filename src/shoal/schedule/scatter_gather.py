"""Long buffers to or from one rank: all ranks share the work of the root."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.schedule.binomial import children, parent, subtree
from shoal.schedule.steps import Buffer, Copy, Finish, Recv, Send, Step


def scatter_gather_broadcast(rank: int, size: int, root: int) -> Iterator[Step]:
    """Scatter the buffer down a binomial tree, then pass its chunks around a ring.

    The ring omits chunks that a rank already has from the scatter, for the ranks below it.

    Cost:   n-1 rounds, since the ring begins while the scatter still runs; the root sends less
            than two buffers, the others less than one and a half.
    Needs:  n chunks (empty ones are legal).
    Leaves: the root's buffer on every rank.
    Source: van de Geijn's broadcast: Barnett et al., SHPCC 1994; Thakur, Rabenseifner & Gropp,
            IJHPCA 2005.
    """
    place = (rank - root) % size
    mine = subtree(place, size)
    if place > 0:
        yield from (Recv((root + parent(place)) % size, chunk) for chunk in mine)
    for child in reversed(children(place, size)):
        yield from (Send((root + child) % size, chunk) for chunk in subtree(child, size))
    theirs = subtree((place + 1) % size, size)
    for k in range(size - 1):
        passed, taken = (place - k) % size, (place - k - 1) % size
        if passed not in theirs:
            yield Send((rank + 1) % size, chunk=passed)
        if taken not in mine:
            yield Recv((rank - 1) % size, chunk=taken)


def scatter_gather_reduce(rank: int, size: int, root: int) -> Iterator[Step]:
    """Send every rank its shard, fold the own shard, and send it to the root.

    Cost:   2 rounds; each rank sends one buffer, 1/n of it to each peer and once more to the root,
            which receives two.
    Needs:  n chunks (empty ones are legal), and one scratch chunk on ranks other than the root.
    Leaves: the root's buffer folded over all ranks; the others' untouched.
    Source: Rabenseifner's reduce (Thakur, Rabenseifner & Gropp, IJHPCA 2005), with a sharded
            reduce-scatter and a direct gather.
    """
    held, own = (Buffer.DATA, rank) if rank == root else (Buffer.SCRATCH, 0)
    if rank != root:
        yield Copy(rank, into=own)
    for k in range(1, size):
        peer = (rank + k) % size
        yield Send(peer, chunk=peer)
    for k in range(1, size):
        yield Recv((rank - k) % size, own, fold=True, buffer=held)
    yield Finish(own, held)
    if rank != root:
        yield Send(root, own, buffer=held)
        return
    for k in range(1, size):
        peer = (root + k) % size
        yield Recv(peer, chunk=peer)


def scatter_gather_scratch(rank: int, size: int, root: int) -> tuple[int, ...]:
    """Return the scratch chunks of `scatter_gather_reduce`, which leaves the buffer unchanged."""
    return () if rank == root else (rank,)
