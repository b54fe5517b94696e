"""What an algorithm is: steps, chunks and scratch by rank and size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shoal.errors import UsageError
from shoal.schedule.symmetry import StandIn, itself

if TYPE_CHECKING:
    from shoal.schedule.steps import Step


def one(size: int) -> int:
    """Chunk rule: the buffer in one piece."""
    return 1


def one_per_rank(size: int) -> int:
    """Chunk rule: a piece for each rank."""
    return size


def _nothing(*_: object) -> tuple[()]:
    return ()


class Algorithm(NamedTuple):
    """One way to do a collective: what each rank does, and the chunks it needs.

    Args:
        function: `f(rank, size)`, `f(rank, size, root)` where `rooted`, or `f(rank, hosts)` where
            `by_host`: yields one rank's steps.
        chunk_rule: by size (by `hosts` where `by_host`): how many chunks the collective's longest
            buffer is cut into.
        scratch_rule: called as `function` is: for each scratch chunk of that rank, the chunk of
            the longest buffer whose length it has.
        owner_rule: by chunk and size: the one rank that finishes that chunk of an all-reduce, in
            DATA; None where several do. What has one can be cut in two at its Finish, so
            `hierarchical` can use it inside a host.
        cut_rule: by the bytes of the longest buffer and size: where its chunks begin, and how long
            they are; multiples of 64 but for the end of the buffer. There may be gaps, which the
            algorithm leaves alone. None: all chunks are equally long and follow one another.
        fit_rule: by the bytes of the longest buffer and size: the algorithm that cuts a buffer of
            that length. None: all lengths are cut alike.
        encodes_once: whether every value that one host sends to another is what no other host has
            added to, or finished, and one rank finishes each chunk and tells every host: so a
            narrow codec rounds each contribution once and the result once, on all ranks alike.
        chain_rule: by size (by `hosts` where `by_host`): sender and receiver of each message of
            a longest chain, see `chains`; for root 0.
        n_servers: so many of the ranks, the last ones, bring no tensor and take none home: they
            reduce in their own memory.
        is_part: whether some of the buffer is in no chunk, since another call sums that.
        alike_rule: by rank and size: the rank that stands in for that one, see `symmetry`; for
            root 0.
        levels: of a hierarchy: the algorithm inside hosts, and that between them.
        scatters: whether every rank sends a part of the buffer to every reducer at once. Nothing
            comes back before a segment of each has come, so between hosts segments are shorter.
        explained_by: whose docstring states Cost, Needs, Leaves and Source; None: `function`'s.
    """

    function: Callable[..., Iterator[Step]]
    chunk_rule: Callable[..., int] = one
    scratch_rule: Callable[..., tuple[int, ...]] = _nothing
    rooted: bool = False
    by_host: bool = False
    owner_rule: Callable[[int, int], int] | None = None
    fit_rule: Callable[[int, int], Algorithm] | None = None
    cut_rule: Callable[[int, int], tuple[list[int], list[int]]] | None = None
    encodes_once: bool = False
    chain_rule: Callable[..., Sequence[tuple[int, int]]] = _nothing
    n_servers: int = 0
    is_part: bool = False
    alike_rule: Callable[[int, int], StandIn] = itself
    levels: tuple[Algorithm, Algorithm] | None = None
    scatters: bool = False
    explained_by: Callable[..., object] | None = None

    def steps(
        self, rank: int, size: int, root: int = 0, hosts: Sequence[int] = ()
    ) -> Iterator[Step]:
        """The steps of `rank`.

        Args:
            root: the one rank that gives or gets all; the peer of a send or recv.
            hosts: the host of every rank, numbered from 0 in the order in which they first come
                up; empty: all ranks are on one.

        Cost: proportional to these steps, whatever the others do.
        """
        if not (0 <= rank < size and 0 <= root < size):
            raise UsageError(f"rank {rank} and root {root} must be in [0, {size})")
        if self.by_host:
            return self.function(rank, _hosts(size, hosts))
        return self.function(rank, size, *((root,) if self.rooted else ()))

    def n_chunks(self, size: int, hosts: Sequence[int] = ()) -> int:
        """How many chunks the collective's longest buffer is cut into."""
        return self.chunk_rule(_hosts(size, hosts) if self.by_host else size)

    def chain(self, size: int, hosts: Sequence[int] = ()) -> Sequence[tuple[int, int]]:
        """Sender and receiver of each message of a longest chain, where rank 0 is the root."""
        return self.chain_rule(_hosts(size, hosts) if self.by_host else size)

    def stand_in(self, rank: int, size: int) -> StandIn:
        """Whose steps tell those of a rank, where rank 0 is the root."""
        return self.alike_rule(rank, size)

    def fitted(self, n_bytes: int, size: int) -> Algorithm:
        """Itself, or its form for buffers of that length, where it cuts short ones less finely."""
        return self.fit_rule(n_bytes, size) if self.fit_rule else self

    @property
    def takes_uneven(self) -> bool:
        """Whether it also works where the blocks of the ranks differ in length: without scratch."""
        return self.scratch_rule is _nothing

    def scratch(
        self, rank: int, size: int, hosts: Sequence[int] = (), root: int = 0
    ) -> tuple[int, ...]:
        """For each scratch chunk of `rank`, the chunk of the longest buffer that is as long."""
        if self.by_host:
            return self.scratch_rule(rank, _hosts(size, hosts))
        return self.scratch_rule(rank, size, *((root,) if self.rooted else ()))


def _hosts(size: int, hosts: Sequence[int]) -> tuple[int, ...]:
    if hosts and len(hosts) != size:
        raise UsageError(f"{len(hosts)} hosts are named for {size} ranks")
    return _checked(tuple(hosts)) if hosts else (0,) * size


# One group asks once for each of its ranks where all are proved or simulated.
@functools.lru_cache(maxsize=8)
def _checked(hosts: tuple[int, ...]) -> tuple[int, ...]:
    for expected, host in enumerate(dict.fromkeys(hosts)):
        if host != expected:
            raise UsageError(
                f"rank {hosts.index(host)} is on host {host}, but hosts must be numbered from 0 "
                f"in the order in which they first come up, and {expected} comes next"
            )
    return hosts
