"""A chain: each rank passes on what it receives."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.schedule.steps import Recv, Send, Step


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
