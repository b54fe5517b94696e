"""Bruck's algorithms: log2 n rounds for blocks of any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.schedule.steps import Buffer, Copy, Recv, Send, Step


def bruck_all_gather(rank: int, size: int) -> Iterator[Step]:
    """Receive from rank+1, then +2, +4 and so on, all blocks that this peer has so far.

    Blocks go straight to their place, so nothing is rotated at the end.

    Cost:   at most ceil(log2 n) rounds; each rank sends n-1 blocks, to ceil(log2 n) peers.
    Needs:  an output of n chunks.
    Leaves: chunk r of the output is the input of rank r, on every rank.
    Source: Bruck et al., IEEE TPDS 1997.
    """
    yield Copy(0, into=rank, buffer=Buffer.INPUT, into_buffer=Buffer.OUTPUT)
    n_held = 1
    while n_held < size:
        to, source = (rank - n_held) % size, (rank + n_held) % size
        n_moved = min(n_held, size - n_held)
        yield Send(to, chunk=0, buffer=Buffer.INPUT)
        for k in range(1, n_moved):
            yield Send(to, chunk=(rank + k) % size, buffer=Buffer.OUTPUT)
        for k in range(n_moved):
            yield Recv(source, chunk=(source + k) % size, buffer=Buffer.OUTPUT)
        n_held += n_moved


def bruck_all_to_all(rank: int, size: int) -> Iterator[Step]:
    """Send a block over a distance of j ranks in hops of 1, 2, 4 and so on, by the bits of j.

    Cost:   at most ceil(log2 n) rounds; each rank sends about n/2 blocks in each, to one peer.
    Needs:  an input and an output of n equal chunks; up to two scratch chunks for each j, since
            a block on its next hop still occupies its place when the next block arrives.
    Leaves: chunk s of the output is chunk `rank` of the input of rank s.
    Source: Bruck et al., IEEE TPDS 1997.
    """
    yield Copy(rank, into=rank, buffer=Buffer.INPUT, into_buffer=Buffer.OUTPUT)
    scratch = _first_scratch(size)
    held = {j: (Buffer.INPUT, (rank + j) % size) for j in range(1, size)}
    hop = 1
    while hop < size:
        to, source = (rank + hop) % size, (rank - hop) % size
        moved = [j for j in range(1, size) if j & hop]
        for j in moved:
            buffer, chunk = held[j]
            yield Send(to, chunk, buffer=buffer)
        for j in moved:
            if j < 2 * hop:
                held[j] = (Buffer.OUTPUT, (rank - j) % size)
            else:
                n_hops = (j & (2 * hop - 1)).bit_count()
                held[j] = (Buffer.SCRATCH, scratch[j] + (n_hops - 1) % 2)
            buffer, chunk = held[j]
            yield Recv(source, chunk, buffer=buffer)
        hop *= 2


def _first_scratch(size: int) -> list[int]:
    """Return the first scratch chunk of each j, and the end; j has two if its block stops twice."""
    first = [0]
    for j in range(size):
        first.append(first[-1] + min(2, max(0, j.bit_count() - 1)))
    return first


def bruck_all_to_all_scratch(rank: int, size: int) -> tuple[int, ...]:
    """Return the scratch chunks of `bruck_all_to_all`."""
    return (0,) * _first_scratch(size)[-1]
