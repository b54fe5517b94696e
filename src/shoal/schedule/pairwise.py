"""Pairwise exchange: in round k every rank meets the ranks k before and k after it."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.schedule.steps import Buffer, Copy, Recv, Send, Step


def pairwise_all_to_all(rank: int, size: int) -> Iterator[Step]:
    """In round k send rank+k its block and receive one's own from rank-k.

    Cost:   1 round; each rank sends n-1 blocks, one to each peer, no two to the same at a time.
    Needs:  an input and an output of n chunks, which may all differ in length.
    Leaves: chunk s of the output is chunk `rank` of the input of rank s.
    Source: Thakur, Rabenseifner & Gropp, IJHPCA 2005.
    """
    yield Copy(rank, into=rank, buffer=Buffer.INPUT, into_buffer=Buffer.OUTPUT)
    for k in range(1, size):
        to, source = (rank + k) % size, (rank - k) % size
        yield Send(to, chunk=to, buffer=Buffer.INPUT)
        yield Recv(source, chunk=source, buffer=Buffer.OUTPUT)
