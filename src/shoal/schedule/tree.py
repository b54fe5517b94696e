r"""NCCL 2.4's double binary tree: a tree for each half of the buffer.

The first tree follows the bits of the rank; the second is the first one flipped, so that its leaves
are the inner ranks of the first. An even number of ranks is mirrored (rank r takes the place of
n-1-r), an odd one shifted by one (of r-1). Both trees of 14 ranks:

    0 --------- 8                        5 --------- 13
          _____/ \_____            _____/ \____
         4             12         1             9
       /   \          /  \       / \          /   \
      2     6       10    13    0   3        7     11
     / \   / \     /  \            / \      / \   /  \
    1   3 5   7   9    11         2   4    6   8 10   12
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shoal.schedule.steps import Finish, Recv, Send, Step


class Branch(NamedTuple):
    """A rank's place in a tree."""

    parent: int | None
    """The next rank on the way to the root; None at the root."""
    children: tuple[int, ...]
    """At most two ranks; the root has at most one."""


def binary_tree(rank: int, size: int) -> Branch:
    """Return the place of `rank` in the tree of `size` ranks that follows their bits.

    Rank 0 is the root, odd ranks are leaves. A rank whose lowest bit is b has its children b/2
    below and b/2 above it; where the latter would be outside the group, half as far, and so on.

    Cost:   proportional to log2 n.
    Source: Jeaugey, "Massively Scale Your Deep Learning Training with NCCL 2.4", figure 1.
    """
    if rank == 0:
        top = 1 << ((size - 1).bit_length() - 1) if size > 1 else 0
        return Branch(None, (top,) if top else ())
    bit = rank & -rank
    without = rank - bit
    parent = without | 2 * bit
    children = [rank - bit // 2] if bit > 1 else []
    below = bit // 2
    while below and rank + below >= size:
        below //= 2
    if below:
        children.append(rank + below)
    return Branch(parent if parent < size else without, tuple(children))


def double_binary_tree(rank: int, size: int) -> tuple[Branch, Branch]:
    """Return the places of `rank` in both trees.

    No rank has more than two children in total. With an even size no rank has children in both
    trees; with an odd size rank 0 has one in each.

    Cost:   proportional to log2 n.
    Source: the same, figure 2; Sanders, Speck & Träff, Parallel Computing 2009.
    """

    def flip(place: int) -> int:
        return (place + 1) % size if size % 2 else size - 1 - place

    parent, children = binary_tree((rank - 1) % size if size % 2 else size - 1 - rank, size)
    second = Branch(
        None if parent is None else flip(parent), tuple(flip(child) for child in children)
    )
    return binary_tree(rank, size), second


def tree_all_reduce(rank: int, size: int) -> Iterator[Step]:
    """Fold each half up its tree, and send the result down the same tree.

    Cost:   2 ceil(log2 n) rounds; each rank sends at most two halves up and two down: with
            pipelining, twice the buffer in total, as a ring does.
    Needs:  2 chunks, one for each tree.
    Leaves: both chunks folded over all ranks, on every rank.
    Source: Jeaugey, "Massively Scale Your Deep Learning Training with NCCL 2.4".
    """
    trees = double_binary_tree(rank, size)
    for chunk, (parent, children) in enumerate(trees):
        for child in children:
            yield Recv(child, chunk, fold=True)
        yield Finish(chunk) if parent is None else Send(parent, chunk)
    for chunk, (parent, children) in enumerate(trees):
        if parent is not None:
            yield Recv(parent, chunk)
        for child in children:
            yield Send(child, chunk)


def tree_chunks(size: int) -> int:
    """Return the number of chunks of `tree_all_reduce`: one for each tree."""
    return 2


def tree_owner(chunk: int, size: int) -> int:
    """Return the root of the tree that folds `chunk`."""
    if chunk == 0 or size == 1:
        return 0
    return 1 if size % 2 else size - 1
