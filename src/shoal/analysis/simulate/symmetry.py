"""Alike ranks: in most schedules a few ranks stand for all, so that large groups cost little.

Ranks are numbered in blocks: rank = block * n_classes + class. Move all ranks by whole blocks, in a
ring or by exclusive or. The blocks are alike if each rank then has the sends and receives of the
rank in its new place, in the same order. Then one block stands for all, and the others are its
peers.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from shoal.analysis.dataflow import Dataflow
from shoal.errors import ProofError
from shoal.schedule import Algorithm, Copy, Finish, Recv, Send, Step

# The number of ranks compared with their stand-in, besides the first and the last. If others
# differ, some of their messages have no counterpart, which is always detected.
_N_COMPARED: Final = 4

StepsOf = Callable[[int], Sequence[Step]]


@dataclass(frozen=True, slots=True)
class SymmetricBlocks:
    """A numbering of ranks in blocks, which move in a ring or by exclusive or."""

    n_classes: int
    n_blocks: int
    by_xor: bool

    def seen_from(self, block: int, other: int) -> int:
        """Return the position of the other block relative to this one."""
        return block ^ other if self.by_xor else (other - block) % self.n_blocks

    def move(self, rank: int, by: int) -> int:
        """Return the rank whose place this rank takes after a move by `by` blocks."""
        block, place = divmod(rank, self.n_classes)
        block = block ^ by if self.by_xor else (block + by) % self.n_blocks
        return block * self.n_classes + place


class BlockFlow(Dataflow):
    """The dataflow of one block that stands for all.

    A Send to a rank of another block is matched with a Recv of the same class in this block, from
    the sender's relative position. ProofError if there is no counterpart: the blocks are not alike.
    """

    def __init__(self, blocks: SymmetricBlocks, steps_of: StepsOf) -> None:
        self.blocks = blocks
        super().__init__([steps_of(rank) for rank in range(blocks.n_classes)])

    def _add_end(self, rank: int, number: int, step: Send | Recv) -> None:
        if isinstance(step, Recv):
            self._recvs[step.peer, rank].append(number)
            return
        block, place = divmod(step.peer, self.blocks.n_classes)
        # The sender's number relative to the receiver, as if the receiver were in block 0.
        self._sends[self.blocks.seen_from(block, 0) * self.blocks.n_classes + rank, place].append(
            number
        )


def flow_of_blocks(steps_of: StepsOf, hosts: Sequence[int], max_steps: int) -> BlockFlow | None:
    """Return the dataflow of the smallest alike blocks with at most about `max_steps`, or None."""
    for blocks in _candidates(hosts):
        if blocks.n_classes * len(steps_of(blocks.n_classes)) > max_steps:
            break
        if _are_alike(blocks, steps_of):
            try:
                return BlockFlow(blocks, steps_of)
            except ProofError:
                continue
    return None


def _candidates(hosts: Sequence[int]) -> Iterator[SymmetricBlocks]:
    """Yield numberings to try: a block is one or more whole hosts, unless there is one host."""
    size, n_hosts = len(hosts), hosts[-1] + 1
    unit = 1 if n_hosts == 1 else size // n_hosts
    if n_hosts > 1 and any(host != rank // unit for rank, host in enumerate(hosts)):
        return
    for n_classes in range(unit, size // 2 + 1, unit):
        n_blocks = size // n_classes
        if size % n_classes == 0:
            yield SymmetricBlocks(n_classes, n_blocks, by_xor=False)
            if n_blocks & (n_blocks - 1) == 0:
                yield SymmetricBlocks(n_classes, n_blocks, by_xor=True)


def _are_alike(blocks: SymmetricBlocks, steps_of: StepsOf) -> bool:
    last, chance = blocks.n_blocks - 1, random.Random(0)
    some = [
        (chance.randrange(blocks.n_classes), chance.randint(1, last)) for _ in range(_N_COMPARED)
    ]
    return all(
        _does_the_same(blocks, by, steps_of(place), steps_of(blocks.move(place, by)))
        for place, by in [(0, last), (blocks.n_classes - 1, 1), *some]
    )


def _does_the_same(
    blocks: SymmetricBlocks, by: int, steps: Sequence[Step], moved: Sequence[Step]
) -> bool:
    """Return True if `moved` are the steps after a move, except for the names of the chunks."""
    if len(steps) != len(moved):
        return False
    names: dict[tuple[int, int], tuple[int, int]] = {}
    for step, other in zip(steps, moved, strict=True):
        if type(step) is not type(other) or step.buffer != other.buffer:
            return False
        if getattr(step, "fold", None) != getattr(other, "fold", None):
            return False
        if isinstance(step, Send | Recv):
            assert isinstance(other, Send | Recv)  # of the same type
            if blocks.move(step.peer, by) != other.peer:
                return False
        for place, there in zip(_places(step), _places(other), strict=True):
            if names.setdefault(place, there) != there:
                return False
    return len(set(names.values())) == len(names)


def _places(step: Step) -> Iterator[tuple[int, int]]:
    yield step.buffer, step.chunk
    if isinstance(step, Copy):
        yield step.into_buffer, step.into


@functools.lru_cache(maxsize=16)
def interleaved(algorithm: Algorithm, size: int) -> Algorithm:
    """Renumber an algorithm's ranks in as many blocks as possible: some workers, then servers.

    With 6 workers and 4 servers, the first block has workers 0 to 2 and servers 0 and 1.
    """
    n_workers, owner_rule = size - algorithm.n_servers, algorithm.owner_rule
    assert owner_rule is not None  # every algorithm with servers has one
    n_blocks = math.gcd(n_workers, algorithm.n_servers)
    workers, servers = n_workers // n_blocks, algorithm.n_servers // n_blocks
    ranks: list[int] = []  # by new number
    for block in range(n_blocks):
        ranks += range(block * workers, (block + 1) * workers)
        ranks += range(n_workers + block * servers, n_workers + (block + 1) * servers)
    places = {rank: place for place, rank in enumerate(ranks)}

    def steps(place: int, size: int) -> Iterator[Step]:
        for step in algorithm.steps(ranks[place], size):
            yield step if isinstance(step, Copy | Finish) else step.replace(peer=places[step.peer])

    return algorithm._replace(
        function=steps,
        scratch_rule=lambda place, size: algorithm.scratch(ranks[place], size),
        owner_rule=lambda chunk, size: places[owner_rule(chunk, size)],
        fit_rule=None,
    )
