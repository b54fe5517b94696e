"""Which ranks do the same, so that the steps of one tell those of others.

A rule names, for each rank of a group whose root is rank 0, one that stands in for it, and what the
peers of that one are called by the other. A test compares their messages for every algorithm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from shoal.schedule.hypercube import Cube
from shoal.schedule.tree import double_binary_tree


class StandIn(NamedTuple):
    """A rank whose messages are those of another, but for the names of its peers."""

    rank: int
    rename: Callable[[int], int]
    """From a peer of `rank` to the one that the other rank has in its place."""
    is_swap: bool = False
    """Whether but the two themselves all have the same names."""


def itself(rank: int, size: int) -> StandIn:
    """Nobody but the rank itself."""
    return StandIn(rank, lambda peer: peer)


def turned(rank: int, size: int) -> StandIn:
    """Rank 0, for all: what counts is how far away a peer is."""
    return StandIn(0, lambda peer: (peer + rank) % size)


def swapped(rank: int, stand_in: int) -> StandIn:
    """Two ranks that could change places: each is the other's peer, all others are the same."""
    names = {stand_in: rank, rank: stand_in}
    return StandIn(stand_in, lambda peer: names.get(peer, peer), is_swap=True)


def all_but_root(rank: int, size: int) -> StandIn:
    """Rank 1, for all but the root."""
    return swapped(rank, min(rank, 1))


def at_corner(rank: int, size: int) -> StandIn:
    """The first rank that has an extra, is one, or does without, as this one does.

    Corners that differ by the same bits are as far away.
    """
    return _moved_to_corner(rank, size, _at_corners(size, 1)[rank])


def at_corner_of_parity(rank: int, size: int) -> StandIn:
    """The same, among those whose corners have an even or an odd number of bits set."""
    return _moved_to_corner(rank, size, _at_corners(size, 2)[rank])


def _moved_to_corner(rank: int, size: int, stand_in: int) -> StandIn:
    cube = Cube.of(size)
    bits = cube.corner(rank) ^ cube.corner(stand_in)
    if not cube.n_pairs:
        return StandIn(stand_in, lambda peer: peer ^ bits)
    if cube.has_pair(rank) and rank % 2:
        return StandIn(stand_in, lambda _: rank - 1)

    def rename(peer: int) -> int:
        is_own_extra = peer == stand_in + 1 and cube.has_pair(peer) and peer % 2
        return rank + 1 if is_own_extra else cube.rank(cube.corner(peer) ^ bits)

    return StandIn(stand_in, rename)


@functools.lru_cache(maxsize=64)
def _at_corners(size: int, n_parities: int) -> list[int]:
    cube = Cube.of(size)
    return first_alike(
        [
            (cube.has_pair(rank), cube.has_pair(rank) and rank % 2, n_bits % n_parities)
            for rank in range(size)
            for n_bits in [cube.corner(rank).bit_count()]
        ]
    )


def of_subtree(rank: int, size: int) -> StandIn:
    """The first rank that has as many others below it in a binomial tree, as has the next one."""
    stand_in = _of_subtrees(size)[rank]
    return StandIn(stand_in, lambda peer: (peer + rank - stand_in) % size)


def in_trees(rank: int, size: int) -> StandIn:
    """The first rank that has as many children in each tree, and meets the same peer in both."""
    peers, stand_ins = _of_trees(size)
    stand_in = stand_ins[rank]
    return StandIn(stand_in, dict(zip(peers[stand_in], peers[rank], strict=True)).__getitem__)


@functools.lru_cache(maxsize=64)
def _of_trees(size: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """The peers of every rank in both trees, and who stands in for it."""
    peers, keys = [], []
    for rank in range(size):
        trees = double_binary_tree(rank, size)
        of_trees = [
            (*tree.children, *(() if tree.parent is None else [tree.parent])) for tree in trees
        ]
        own = of_trees[0] + of_trees[1]
        shape = [(len(tree.children), tree.parent is None) for tree in trees]
        peers.append(own)
        keys.append((*shape, *map(own.index, own)))
    return peers, first_alike(keys)


def first_alike(keys: Sequence[Hashable]) -> list[int]:
    """Of each, the first that has the same key."""
    first = {key: rank for rank, key in reversed(list(enumerate(keys)))}
    return [first[key] for key in keys]


@functools.lru_cache(maxsize=64)
def _of_subtrees(size: int) -> list[int]:
    n_below = [min(rank & -rank, size - rank) if rank else size for rank in range(size)]
    keys = [(n_below[rank], rank & -rank, n_below[(rank + 1) % size]) for rank in range(size)]
    return first_alike(keys)
