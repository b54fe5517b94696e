"""Dissemination: the number of contributions that a rank holds doubles in every round."""

from __future__ import annotations

from collections.abc import Iterator

from shoal.schedule.steps import Buffer, Copy, Recv, Send, Step


def dissemination_barrier(rank: int, size: int) -> Iterator[Step]:
    """Send all contributions received so far to rank+1, then to rank+2, +4 and so on.

    Cost:   ceil(log2 n) rounds; each rank sends one buffer in each of them.
    Needs:  one scratch chunk, since a fold cannot change a chunk that is being sent. The fold must
            be idempotent (max, or): unless n is a power of two, some contributions arrive twice.
    Leaves: every rank's contribution in every rank's buffer, folded in any order.
    Source: Hensgen, Finkel & Manber, IJPP 1988.
    """
    distance = 1
    while distance < size:
        yield Send((rank + distance) % size, chunk=0)
        yield Recv((rank - distance) % size, chunk=0, buffer=Buffer.SCRATCH)
        yield Copy(0, into=0, buffer=Buffer.SCRATCH, into_buffer=Buffer.DATA, fold=True)
        distance *= 2
