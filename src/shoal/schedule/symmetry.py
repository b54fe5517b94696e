"""Ranks with the same steps, so that one rank can be counted for many.

A rule returns, for each rank of a group with root 0, a rank that stands in for it, and a renaming
of that rank's peers. A test compares their messages for every algorithm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from shoal.schedule.hypercube import Cube
from shoal.schedule.tree import double_binary_tree


class StandIn(NamedTuple):
    """A rank with the same messages as another, except for the names of its peers."""

    rank: int
    rename: Callable[[int], int]
    """Maps a peer of `rank` to the corresponding peer of the other rank."""
    is_swap: bool = False
    """True if the renaming only swaps these two ranks."""


def itself(rank: int, size: int) -> StandIn:
    """Return the rank as its own stand-in."""
    return StandIn(rank, lambda peer: peer)


def turned(rank: int, size: int) -> StandIn:
    """Return rank 0 for all ranks: only the distance of a peer matters."""
    return StandIn(0, lambda peer: (peer + rank) % size)


def swapped(rank: int, stand_in: int) -> StandIn:
    """Return a rank that could swap places with this rank; all other peers are the same."""
    names = {stand_in: rank, rank: stand_in}
    return StandIn(stand_in, lambda peer: names.get(peer, peer), is_swap=True)


def all_but_root(rank: int, size: int) -> StandIn:
    """Return rank 1 for all ranks but the root."""
    return swapped(rank, min(rank, 1))


def at_corner(rank: int, size: int) -> StandIn:
    """Return the first rank of the same kind: with an extra, an extra itself, or neither.

    Corners that differ by the same bits are equally far away.
    """
    return _moved_to_corner(rank, size, _at_corners(size, 1)[rank])


def at_corner_of_parity(rank: int, size: int) -> StandIn:
    """Return the rank as `at_corner` does, among corners with equal parity of their set bits."""
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
    """Return the first rank with equal subtrees in a binomial tree, its own and the next rank's."""
    stand_in = _of_subtrees(size)[rank]
    return StandIn(stand_in, lambda peer: (peer + rank - stand_in) % size)


def in_trees(rank: int, size: int) -> StandIn:
    """Return the first rank with equal numbers of children in both trees, and the same peers."""
    peers, stand_ins = _of_trees(size)
    stand_in = stand_ins[rank]
    return StandIn(stand_in, dict(zip(peers[stand_in], peers[rank], strict=True)).__getitem__)


@functools.lru_cache(maxsize=64)
def _of_trees(size: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return the peers of every rank in both trees, and its stand-in."""
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
    """Return, for each key, the index of the first equal one."""
    first = {key: rank for rank, key in reversed(list(enumerate(keys)))}
    return [first[key] for key in keys]


@functools.lru_cache(maxsize=64)
def _of_subtrees(size: int) -> list[int]:
    n_below = [min(rank & -rank, size - rank) if rank else size for rank in range(size)]
    keys = [(n_below[rank], rank & -rank, n_below[(rank + 1) % size]) for rank in range(size)]
    return first_alike(keys)
