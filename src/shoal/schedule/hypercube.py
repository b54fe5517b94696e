"""Hypercubes: ranks exchange at distance 1, then 2, 4 and so on, in log2 n rounds.

The number of corners is the largest power of two that fits. The remaining ranks are extras, each
paired with one of the first ranks. An extra sends its buffer before the first round, and receives
the result after the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shoal.schedule.steps import Buffer, Copy, Finish, Recv, Send, Step


class Cube(NamedTuple):
    """The places of a group's ranks on a hypercube."""

    n_corners: int
    """The largest power of two that is not above the size."""
    n_pairs: int
    """The number of corners with an extra rank: rank 2i is at corner i, and 2i+1 is its extra."""

    @classmethod
    def of(cls, size: int) -> Cube:
        """Return the cube for a group of that size."""
        n_corners = 1 << (size.bit_length() - 1)
        return cls(n_corners, size - n_corners)

    def corner(self, rank: int) -> int:
        """Return the corner of `rank`, or of the rank whose extra it is."""
        return rank // 2 if self.has_pair(rank) else rank - self.n_pairs

    def rank(self, corner: int) -> int:
        """Return the rank at a corner."""
        return 2 * corner if corner < self.n_pairs else corner + self.n_pairs

    def has_pair(self, rank: int) -> bool:
        """Return True if `rank` is one of two at its corner."""
        return rank < 2 * self.n_pairs

    def distances(self) -> list[int]:
        """Return the lengths of the cube's edges: 1, 2, 4 and so on."""
        return [1 << bit for bit in range(self.n_corners.bit_length() - 1)]


def doubling_all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Exchange the whole buffer along each edge and fold it, which doubles the contributions.

    The lower corner is the left operand on both sides: all ranks compute the same expression.

    Cost:   ceil(log2 n) rounds, one more if n is not a power of two; each rank sends log2 n whole
            buffers, or one more, so it is for short buffers.
    Needs:  one scratch chunk at every corner. A fold into the buffer that is being sent would wait
            for the peer, which would do the same: a deadlock.
    Leaves: the buffer folded over all ranks, on every rank.
    Source: Thakur, Rabenseifner & Gropp, IJHPCA 2005: recursive doubling.
    """
    cube = Cube.of(size)
    if cube.has_pair(rank) and rank % 2:
        yield Send(rank - 1, chunk=0)
        yield Recv(rank - 1, chunk=0)
        return
    if cube.has_pair(rank):
        yield Recv(rank + 1, chunk=0, fold=True)
    corner, held, other = cube.corner(rank), Buffer.DATA, Buffer.SCRATCH
    for distance in cube.distances():
        peer = cube.rank(corner ^ distance)
        yield Send(peer, chunk=0, buffer=held)
        yield Recv(peer, chunk=0, buffer=other)
        if corner & distance:
            held, other = other, held
        yield Copy(0, into=0, buffer=other, into_buffer=held, fold=True)
    yield Finish(0, held)
    if cube.has_pair(rank):
        yield Send(rank + 1, chunk=0, buffer=held)
    if held is Buffer.SCRATCH:
        yield Copy(0, into=0, buffer=held, into_buffer=Buffer.DATA)


def doubling_scratch(rank: int, size: int) -> tuple[int, ...]:
    """Return the scratch chunks of `doubling_all_reduce`; extra or single ranks have none."""
    cube = Cube.of(size)
    is_extra = cube.has_pair(rank) and rank % 2 == 1
    return () if is_extra or size == 1 else (0,)


def halving_all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Exchange halves of the remaining part along each edge, then reassemble the buffer.

    The first exchange is the longest and with the nearest rank, so most bytes stay near.

    Cost:   2 log2 n rounds; each rank sends 2(n-1)/n of the buffer. If n is not a power of two: p
            corners, 2 log2 p + 2 rounds, one buffer more for the ranks of a pair.
    Needs:  p chunks (empty ones are legal). Halves are sent as their chunks, p-1 messages each way,
            so this is for buffers whose chunks are not tiny.
    Leaves: every chunk folded over all ranks, on every rank.
    Source: Rabenseifner, ICCS 2004: recursive vector halving and distance doubling.
    """
    cube = Cube.of(size)
    p, corner = cube.n_corners, cube.corner(rank)
    if cube.has_pair(rank) and rank % 2:
        yield from (Send(rank - 1, chunk) for chunk in range(p))
        yield from (Recv(rank - 1, chunk) for chunk in range(p))
        return
    if cube.has_pair(rank):
        yield from (Recv(rank + 1, chunk, fold=True) for chunk in range(p))
    for distance in cube.distances():
        peer, kept, given = _halves(cube, corner, distance)
        yield from (Send(peer, chunk) for chunk in given)
        yield from (Recv(peer, chunk, fold=True) for chunk in kept)
    yield Finish(corner)
    for distance in reversed(cube.distances()):
        peer, kept, given = _halves(cube, corner, distance)
        yield from (Send(peer, chunk) for chunk in kept)
        yield from (Recv(peer, chunk) for chunk in given)
    if cube.has_pair(rank):
        yield from (Send(rank + 1, chunk) for chunk in range(p))


def _halves(cube: Cube, corner: int, distance: int) -> tuple[int, list[int], list[int]]:
    """Return the peer at that distance, the chunks that stay here, and the chunks sent there.

    Each corner's own chunk comes first, so that no chunk is the first or the last on all ranks.
    """
    there, stride = corner ^ distance, 2 * distance
    kept, given = (
        [owner ^ offset for offset in range(0, cube.n_corners, stride)] for owner in (corner, there)
    )
    return cube.rank(there), kept, given


def halving_chunks(size: int) -> int:
    """Return the number of chunks of `halving_all_reduce`: one for each corner."""
    return Cube.of(size).n_corners


def halving_owner(chunk: int, size: int) -> int:
    """Return the rank that finishes a chunk of `halving_all_reduce`."""
    return Cube.of(size).rank(chunk)
