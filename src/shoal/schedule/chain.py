"""A chain: each rank passes received data on to the next."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.schedule.steps import Buffer, Copy, Finish, Recv, Send, Step


def chain_broadcast(rank: int, size: int, root: int) -> Iterator[Step]:
    """Pass the buffer from the root to root+1, root+2 and so on.

    Segments follow one another down the chain, so a long buffer takes the time of one transfer.

    Cost:   n-1 rounds; each rank but the last sends the whole buffer once.
    Needs:  1 chunk.
    Leaves: the root's buffer on every rank.
    Source: the pipelined broadcast of NCCL's ring.
    """
    place = (rank - root) % size
    if place > 0:
        yield Recv((rank - 1) % size, chunk=0)
    if place < size - 1:
        yield Send((rank + 1) % size, chunk=0)


def chain_reduce(rank: int, size: int, root: int) -> Iterator[Step]:
    """Pass the sum from root-1 to root-2 and so on, around to the root.

    Segments follow one another down the chain, so a long buffer takes the time of one transfer.

    Cost:   n-1 rounds; each rank but the root sends the whole buffer once.
    Needs:  1 chunk, and one scratch chunk on ranks that have both neighbours.
    Leaves: the root's buffer folded over all ranks; the others' untouched.
    Source: the pipelined reduce of NCCL's ring.
    """
    place = (rank - root) % size
    held = Buffer.SCRATCH if 0 < place < size - 1 else Buffer.DATA
    if held is Buffer.SCRATCH:
        yield Copy(0, into=0)
    if place < size - 1:
        yield Recv((rank + 1) % size, chunk=0, fold=True, buffer=held)
    if place > 0:
        yield Send((rank - 1) % size, chunk=0, buffer=held)
    else:
        yield Finish(0)


def chain_scratch(rank: int, size: int, root: int) -> tuple[int, ...]:
    """Return the scratch chunks of `chain_reduce`, which leaves the own contribution unchanged."""
    return (0,) if 0 < (rank - root) % size < size - 1 else ()
