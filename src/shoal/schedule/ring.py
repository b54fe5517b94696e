"""Rings: each rank sends only to its right and receives only from its left."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.schedule.steps import Buffer, Copy, Finish, Recv, Send, Step


def ring_all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Pass partial sums once around the ring, then the finished chunks once more.

    Cost:   2(n-1) rounds; each rank sends 2(n-1)/n of the buffer, all of it to the right.
    Needs:  n chunks (empty ones are legal).
    Leaves: every chunk folded over all ranks, on every rank.
    Source: Patarasuk & Yuan, JPDC 2009.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    for k in range(size - 1):
        yield Send(right, chunk=(rank - k) % size)
        yield Recv(left, chunk=(rank - k - 1) % size, fold=True)
    yield Finish(chunk=(rank + 1) % size)
    for k in range(size - 1):
        yield Send(right, chunk=(rank + 1 - k) % size)
        yield Recv(left, chunk=(rank - k) % size)


def ring_owner(chunk: int, size: int) -> int:
    """Return the rank that finishes a chunk of `ring_all_reduce`."""
    return (chunk - 1) % size


def ring_all_gather(rank: int, size: int) -> Iterator[Step]:
    """Pass every rank's block once around the ring.

    Cost:   n-1 rounds; each rank sends n-1 blocks, all of them to the right.
    Needs:  an output of n chunks.
    Leaves: chunk r of the output is the input of rank r, on every rank.
    Source: Patarasuk & Yuan, JPDC 2009: the second half of the ring all-reduce.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    yield Copy(0, into=rank, buffer=Buffer.INPUT, into_buffer=Buffer.OUTPUT)
    if size > 1:
        yield Send(right, chunk=0, buffer=Buffer.INPUT)
    for k in range(1, size):
        yield Recv(left, chunk=(rank - k) % size, buffer=Buffer.OUTPUT)
        if k < size - 1:
            yield Send(right, chunk=(rank - k) % size, buffer=Buffer.OUTPUT)


def ring_reduce_scatter(rank: int, size: int) -> Iterator[Step]:
    """Pass the partial sum of block r around the ring from rank r+1 to rank r.

    Cost:   n-1 rounds; each rank sends n-1 blocks, all of them to the right.
    Needs:  two scratch chunks. With one, every rank would wait for its right neighbour to take
            the last partial sum before it could take the next: a deadlock around the ring.
    Leaves: the output is block `rank` of the input folded over all ranks; the input is untouched.
    Source: Patarasuk & Yuan, JPDC 2009: the first half of the ring all-reduce.
    """
    right, left = (rank + 1) % size, (rank - 1) % size
    yield Copy(rank, into=0, buffer=Buffer.INPUT, into_buffer=Buffer.OUTPUT)
    if size > 1:
        yield Send(right, chunk=left, buffer=Buffer.INPUT)
        for k in range(2, size):
            partial = k % 2
            yield Copy((rank - k) % size, into=partial, buffer=Buffer.INPUT)
            yield Recv(left, chunk=partial, fold=True, buffer=Buffer.SCRATCH)
            yield Send(right, chunk=partial, buffer=Buffer.SCRATCH)
        yield Recv(left, chunk=0, fold=True, buffer=Buffer.OUTPUT)
    yield Finish(0, Buffer.OUTPUT)


def ring_scratch(rank: int, size: int) -> tuple[int, ...]:
    """Return the scratch chunks of `ring_reduce_scatter`, which passes on n-2 partial sums."""
    return (0, 0)[: max(0, size - 2)]
