"""The longest chain of messages of each algorithm, in which each message waits for the previous.

Running a whole schedule finds the chain too, but takes too long for large groups. Each function
takes the number of ranks, and returns the sender and receiver of every message of one longest chain
with root 0. If only the distance of a message matters, it goes from or to rank 0. A test compares
the length with the longest chain of the dataflow, and looks for each message in the steps.
"""

from __future__ import annotations

import itertools

from shoal.schedule.hypercube import Cube
from shoal.schedule.tree import binary_tree

Chain = list[tuple[int, int]]
"""The sender and receiver of each message, the first message first."""


def gather(size: int) -> Chain:
    """Return one message, to rank 0."""
    return [(size - 1, 0)] if size > 1 else []


def scatter(size: int) -> Chain:
    """Return one message, from rank 0."""
    return _back(gather(size))


def there_and_back(size: int) -> Chain:
    """Return a message to rank 0, and its answer."""
    return gather(size) + scatter(size)


def ring(size: int) -> Chain:
    """Return a message over every edge of the ring but the last."""
    return [(rank, rank + 1) for rank in range(size - 1)]


def ring_reversed(size: int) -> Chain:
    """Return the messages of `ring` in the other direction, to rank 0."""
    return _back(ring(size))


def ring_twice(size: int) -> Chain:
    """Return messages twice around the ring, without the last two edges."""
    return [(k % size, (k + 1) % size) for k in range(2 * (size - 1))]


def dissemination(size: int) -> Chain:
    """Return messages over the distances 1, 2, 4 and so on."""
    return [(0, 1 << bit) for bit in range((size - 1).bit_length())]


def bruck(size: int) -> Chain:
    """Return the hops of the block with the most hops, which goes to the deepest place."""
    return [(0, place ^ above) for above, place in binomial(size)]


def bruck_reversed(size: int) -> Chain:
    """Return the hops of `bruck`, towards lower ranks."""
    return [(hop, 0) for _, hop in bruck(size)]


def hypercube(size: int) -> Chain:
    """Return a message along each edge, from and to the extra rank of the first corner."""
    return _with_extra(size, _edges(size))


def hypercube_and_back(size: int) -> Chain:
    """Return the messages of `hypercube`, and back along each edge."""
    edges = _edges(size)
    return _with_extra(size, edges + _back(edges))


def _edges(size: int) -> Chain:
    cube = Cube.of(size)
    return [(cube.rank(0), cube.rank(distance)) for distance in cube.distances()]


def _with_extra(size: int, chain: Chain) -> Chain:
    return [(1, 0), *chain, (0, 1)] if Cube.of(size).n_pairs else chain


def binomial(size: int) -> Chain:
    """Return the path from rank 0 to the deepest place: one with the most bits set."""
    last = size - 1
    most = (1 << last.bit_length()) - 1
    place = last if last == most else most >> 1
    path = [place]
    while path[-1]:
        path.append(path[-1] & (path[-1] - 1))
    return _back(list(itertools.pairwise(path)))


def binomial_reversed(size: int) -> Chain:
    """Return the path from the deepest place to rank 0."""
    return _back(binomial(size))


def tree(size: int) -> Chain:
    """Return the path from a deepest leaf of the first tree to its root, and back."""
    path = [1] if size > 1 else [0]
    while (parent := binary_tree(path[-1], size).parent) is not None:
        path.append(parent)
    up = list(itertools.pairwise(path))
    return up + _back(up)


def _back(chain: Chain) -> Chain:
    """Return the messages in the other direction, the last one first."""
    return [(to, source) for source, to in reversed(chain)]
