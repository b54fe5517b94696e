"""Binomial trees: every rank that has the data passes it on, so each round doubles their number.

Places count from the root. The parent of a place is the place without its lowest bit; the subtree
of a place is the range that begins with it and is as long as the value of that bit.
"""

from __future__ import annotations

from collections.abc import Iterator

from shoal.schedule.steps import Buffer, Copy, Finish, Recv, Send, Step


def parent(place: int) -> int:
    """Return the parent of any place but the root."""
    return place & (place - 1)


def children(place: int, size: int) -> list[int]:
    """Return the children of a place, nearest first: the smallest subtree first."""
    below = (place + (1 << bit) for bit in range(size.bit_length()))
    return [child for child in below if child < size and parent(child) == place]


def subtree(place: int, size: int) -> range:
    """Return the places whose path to the root passes `place`, itself included."""
    return range(size) if place == 0 else range(place, min(size, place + (place & -place)))


def binomial_broadcast(rank: int, size: int, root: int) -> Iterator[Step]:
    """Receive the buffer from the parent and pass it on, to the largest subtree first.

    Cost:   at most ceil(log2 n) rounds; the root sends the buffer ceil(log2 n) times, others less.
    Needs:  1 chunk.
    Leaves: the root's buffer on every rank.
    Source: Thakur, Rabenseifner & Gropp, IJHPCA 2005.
    """
    place = (rank - root) % size
    if place > 0:
        yield Recv((root + parent(place)) % size, chunk=0)
    for child in reversed(children(place, size)):
        yield Send((root + child) % size, chunk=0)


def binomial_reduce(rank: int, size: int, root: int) -> Iterator[Step]:
    """Fold the children's buffers, and send the sum to the parent.

    Cost:   at most ceil(log2 n) rounds; every rank but the root sends the buffer once.
    Needs:  1 chunk, and one scratch chunk on inner ranks other than the root.
    Leaves: the root's buffer folded over all ranks, from the root upwards; others' untouched.
    Source: Thakur, Rabenseifner & Gropp, IJHPCA 2005.
    """
    place = (rank - root) % size
    below = [(root + child) % size for child in children(place, size)]
    held = Buffer.SCRATCH if place and below else Buffer.DATA
    if held is Buffer.SCRATCH:
        yield Copy(0, into=0)
    for child in below:
        yield Recv(child, chunk=0, fold=True, buffer=held)
    if place > 0:
        yield Send((root + parent(place)) % size, chunk=0, buffer=held)
    else:
        yield Finish(0)


def binomial_reduce_scratch(rank: int, size: int, root: int) -> tuple[int, ...]:
    """Return the scratch chunks of `binomial_reduce`."""
    place = (rank - root) % size
    return (0,) if place > 0 and children(place, size) else ()


def binomial_gather(rank: int, size: int, root: int) -> Iterator[Step]:
    """Collect the blocks of the own subtree, and send them to the parent.

    Cost:   at most ceil(log2 n) rounds; a rank sends every block of its subtree. The root receives
            n-1 blocks as in `direct`, but from log2 n ranks.
    Needs:  an output of n chunks on the root; a scratch chunk for every other rank of a subtree.
    Leaves: chunk r of the root's output is the input of rank r.
    Source: Thakur, Rabenseifner & Gropp, IJHPCA 2005.
    """
    place = (rank - root) % size
    if place == 0:
        yield Copy(0, into=rank, buffer=Buffer.INPUT, into_buffer=Buffer.OUTPUT)
    for child in children(place, size):
        for block in subtree(child, size):
            buffer, chunk = _kept(place, block, size, root)
            yield Recv((root + child) % size, chunk, buffer=buffer)
    if place > 0:
        above = (root + parent(place)) % size
        yield Send(above, chunk=0, buffer=Buffer.INPUT)
        for block in subtree(place, size)[1:]:
            buffer, chunk = _kept(place, block, size, root)
            yield Send(above, chunk, buffer=buffer)


def binomial_scatter(rank: int, size: int, root: int) -> Iterator[Step]:
    """Receive the blocks of the own subtree from the parent, and pass on all but its own block.

    Cost:   at most ceil(log2 n) rounds; a rank sends every block of its subtree but its own. The
            root sends n-1 blocks as in `direct`, but to log2 n ranks.
    Needs:  an input of n chunks on the root; a scratch chunk for every other rank of a subtree.
    Leaves: the output is block `rank` of the root's input.
    Source: Thakur, Rabenseifner & Gropp, IJHPCA 2005.
    """
    place = (rank - root) % size
    if place == 0:
        yield Copy(rank, into=0, buffer=Buffer.INPUT, into_buffer=Buffer.OUTPUT)
    else:
        above = (root + parent(place)) % size
        yield Recv(above, chunk=0, buffer=Buffer.OUTPUT)
        for block in subtree(place, size)[1:]:
            _, chunk = _kept(place, block, size, root)
            yield Recv(above, chunk, buffer=Buffer.SCRATCH)
    for child in reversed(children(place, size)):
        for block in subtree(child, size):
            buffer, chunk = _kept(place, block, size, root)
            buffer = Buffer.INPUT if place == 0 else buffer
            yield Send((root + child) % size, chunk, buffer=buffer)


def _kept(place: int, block: int, size: int, root: int) -> tuple[Buffer, int]:
    """Return the place of a block from below: the root's output or input, or scratch elsewhere."""
    if place == 0:
        return Buffer.OUTPUT, (root + block) % size
    return Buffer.SCRATCH, block - place - 1


def binomial_blocks_scratch(rank: int, size: int, root: int) -> tuple[int, ...]:
    """Return the scratch chunks of `binomial_gather` and `binomial_scatter`.

    There is one for each other rank of the subtree.
    """
    place = (rank - root) % size
    return tuple((root + block) % size for block in subtree(place, size)[1:]) if place else ()
