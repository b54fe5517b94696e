"""An algorithm: its steps, chunks and scratch by rank and size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shoal.errors import UsageError
from shoal.schedule.symmetry import StandIn, itself

if TYPE_CHECKING:
    from shoal.schedule.steps import Step


def one(size: int) -> int:
    """Return 1: the chunk rule of a buffer that is not cut."""
    return 1


def one_per_rank(size: int) -> int:
    """Return the number of ranks: the chunk rule of a buffer with a piece for each rank."""
    return size


def one_unless_alone(rank: int, size: int) -> tuple[int, ...]:
    """Return one scratch chunk as long as chunk 0, or none for a single rank."""
    return (0,) if size > 1 else ()


def _nothing(*_: object) -> tuple[()]:
    return ()


class Algorithm(NamedTuple):
    """One way to do a collective: the steps of each rank, and the chunks they need.

    Args:
        function: yields one rank's steps: `f(rank, size)`, `f(rank, size, root)` if `rooted`, or
            `f(rank, hosts)` if `by_host`.
        chain_rule: maps size (`hosts` if `by_host`) to the sender and receiver of each message of a
            longest chain with root 0, see `chains`. The planner charges its messages' latency.
        chunk_rule: maps size (`hosts` if `by_host`) to the number of chunks of the collective's
            longest buffer.
        scratch_rule: maps the arguments of `function` to a chunk of the longest buffer for each
            scratch chunk of that rank; both chunks have the same length.
        owner_rule: maps chunk and size to the one rank that finishes that chunk of an all-reduce,
            in DATA. None: several ranks do. An algorithm with owners can be cut in two at its
            Finish, so `hierarchical` can use it inside a host.
        cut_rule: maps the bytes of the longest buffer, size and a unit (default 64) to the offsets
            of its chunks and their lengths, multiples of the unit except at the end of the buffer.
            The algorithm does not touch gaps between them. None: all chunks have equal lengths and
            follow one another.
        fit_rule: maps the bytes of the longest buffer and size to the algorithm that cuts a buffer
            of that length. None: all lengths are cut the same way.
        encodes_once: True if hosts send each other only their own sums and finished values, and
            one rank finishes each chunk for all hosts. Then a narrow codec rounds each contribution
            once and the result once, equally on all ranks.
        n_servers: the number of ranks, the last ones, that have no tensor and reduce in their own
            memory.
        is_part: True if a part of the buffer is in no chunk, because another call sums it.
        alike_rule: maps rank and size to the rank that stands in for that one with root 0, see
            `symmetry`.
        levels: for a hierarchy: the algorithm inside hosts, and the algorithm between hosts.
        scatters: True if every rank sends a part of the buffer to every reducer at once. No result
            returns before a segment of each has arrived, so between hosts segments are shorter.
        explained_by: the object whose docstring states Cost, Needs, Leaves and Source; None:
            `function`.
    """

    function: Callable[..., Iterator[Step]]
    chain_rule: Callable[..., Sequence[tuple[int, int]]]
    chunk_rule: Callable[..., int] = one
    scratch_rule: Callable[..., tuple[int, ...]] = _nothing
    rooted: bool = False
    by_host: bool = False
    owner_rule: Callable[[int, int], int] | None = None
    fit_rule: Callable[[int, int], Algorithm] | None = None
    cut_rule: Callable[..., tuple[list[int], list[int]]] | None = None
    encodes_once: bool = False
    n_servers: int = 0
    is_part: bool = False
    alike_rule: Callable[[int, int], StandIn] = itself
    levels: tuple[Algorithm, Algorithm] | None = None
    scatters: bool = False
    explained_by: Callable[..., object] | None = None

    def steps(
        self, rank: int, size: int, root: int = 0, hosts: Sequence[int] = ()
    ) -> Iterator[Step]:
        """Return the steps of `rank`.

        Args:
            root: the root of the collective, or the peer of a send or recv.
            hosts: the host of every rank, numbered from 0 in order of first appearance; empty:
                all ranks share one.

        Cost: proportional to these steps, and independent of the other ranks' steps.
        """
        if not (0 <= rank < size and 0 <= root < size):
            raise UsageError(f"rank {rank} and root {root} must be in [0, {size})")
        if self.by_host:
            return self.function(rank, _hosts(size, hosts))
        return self.function(rank, size, *((root,) if self.rooted else ()))

    def n_chunks(self, size: int, hosts: Sequence[int] = ()) -> int:
        """Return the number of chunks of the collective's longest buffer."""
        return self.chunk_rule(_hosts(size, hosts) if self.by_host else size)

    def chain(self, size: int, hosts: Sequence[int] = ()) -> Sequence[tuple[int, int]]:
        """Return sender and receiver of each message of a longest chain, with root 0."""
        return self.chain_rule(_hosts(size, hosts) if self.by_host else size)

    def fitted(self, n_bytes: int, size: int) -> Algorithm:
        """Return the algorithm's form for buffers of that length; short ones have fewer chunks."""
        return self.fit_rule(n_bytes, size) if self.fit_rule else self

    @property
    def takes_uneven(self) -> bool:
        """True if the ranks' blocks may differ in length: scratch needs equal blocks."""
        return self.scratch_rule is _nothing

    def scratch(
        self, rank: int, size: int, hosts: Sequence[int] = (), root: int = 0
    ) -> tuple[int, ...]:
        """Return, by scratch chunk of `rank`, a chunk of the longest buffer of the same length."""
        if self.by_host:
            return self.scratch_rule(rank, _hosts(size, hosts))
        return self.scratch_rule(rank, size, *((root,) if self.rooted else ()))


def _hosts(size: int, hosts: Sequence[int]) -> tuple[int, ...]:
    if hosts and len(hosts) != size:
        raise UsageError(f"hosts must have one entry per rank: {len(hosts)} for {size} ranks")
    return _checked(tuple(hosts)) if hosts else (0,) * size


# Proofs and simulations call this once for each rank of one group.
@functools.lru_cache(maxsize=8)
def _checked(hosts: tuple[int, ...]) -> tuple[int, ...]:
    for expected, host in enumerate(dict.fromkeys(hosts)):
        if host != expected:
            raise UsageError(
                f"rank {hosts.index(host)} is on host {host}, but hosts must be numbered from 0 "
                f"in order of first appearance, and {expected} comes next"
            )
    return hosts
