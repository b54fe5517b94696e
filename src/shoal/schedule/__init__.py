"""The schedule language and every algorithm written in it. Standard library only, no I/O.

`ALGORITHMS` names all there is: `ALGORITHMS["all_reduce"]["ring"].steps(rank, size)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from shoal.errors import UsageError
from shoal.schedule.chain import chain_broadcast
from shoal.schedule.direct import (
    direct_all_gather,
    direct_all_reduce,
    direct_broadcast,
    direct_reduce_scatter,
    direct_scratch,
)
from shoal.schedule.point import recv, send
from shoal.schedule.promise import Place, Promise, Value, promise
from shoal.schedule.ring import (
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    ring_scratch,
)
from shoal.schedule.sharded import sharded_all_reduce
from shoal.schedule.steps import Buffer, Copy, Finish, Recv, Send, Step

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Buffer",
    "Copy",
    "Finish",
    "Place",
    "Promise",
    "Recv",
    "Send",
    "Step",
    "Value",
    "find",
    "promise",
]


def _one(size: int) -> int:
    return 1


def _one_per_rank(size: int) -> int:
    return size


def _nothing(rank: int, size: int) -> tuple[int, ...]:
    return ()


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to do a collective: what each rank does, and the chunks it needs.

    Args:
        function: `f(rank, size)`, `f(rank, size, root)` where `rooted`, or `f(rank, hosts)` where
            `by_host`: yields one rank's steps.
        chunk_rule: by size (by `hosts` where `by_host`): how many chunks the collective's longest
            buffer is cut into.
        scratch_rule: by rank and size (by rank and `hosts` where `by_host`): for each scratch
            chunk of that rank, the chunk of the longest buffer whose length it has.
    """

    function: Callable[..., Iterator[Step]]
    chunk_rule: Callable[..., int] = _one
    scratch_rule: Callable[..., tuple[int, ...]] = _nothing
    rooted: bool = False
    by_host: bool = False

    def steps(
        self, rank: int, size: int, root: int = 0, hosts: Sequence[int] = ()
    ) -> Iterator[Step]:
        """The steps of `rank`. `root` is a broadcast's source, or the peer of a send or recv.

        Args:
            hosts: the host of every rank, numbered from 0 in the order in which they first come
                up; empty: all ranks are on one.

        Cost: proportional to these steps, whatever the others do.
        """
        if not (0 <= rank < size and 0 <= root < size):
            raise UsageError(f"rank {rank} and root {root} must be in [0, {size})")
        if self.by_host:
            return self.function(rank, _hosts(size, hosts))
        return self.function(rank, size, root) if self.rooted else self.function(rank, size)

    def n_chunks(self, size: int, hosts: Sequence[int] = ()) -> int:
        """How many chunks the collective's longest buffer is cut into."""
        return self.chunk_rule(_hosts(size, hosts) if self.by_host else size)

    def scratch(self, rank: int, size: int, hosts: Sequence[int] = ()) -> tuple[int, ...]:
        """For each scratch chunk of `rank`, the chunk of the longest buffer that is as long.

        An algorithm without any also works where the blocks of the ranks differ in length.
        """
        return self.scratch_rule(rank, _hosts(size, hosts) if self.by_host else size)


def _hosts(size: int, hosts: Sequence[int]) -> tuple[int, ...]:
    if hosts and len(hosts) != size:
        raise UsageError(f"{len(hosts)} hosts are named for {size} ranks")
    return tuple(hosts) or (0,) * size


ALGORITHMS: Final[Mapping[str, Mapping[str, Algorithm]]] = MappingProxyType(
    {
        "all_reduce": {
            "direct": Algorithm(direct_all_reduce, _one, direct_scratch),
            "sharded": Algorithm(sharded_all_reduce, _one_per_rank),
            "ring": Algorithm(ring_all_reduce, _one_per_rank),
        },
        "broadcast": {
            "direct": Algorithm(direct_broadcast, rooted=True),
            "chain": Algorithm(chain_broadcast, rooted=True),
        },
        "all_gather": {
            "direct": Algorithm(direct_all_gather, _one_per_rank),
            "ring": Algorithm(ring_all_gather, _one_per_rank),
        },
        "reduce_scatter": {
            "direct": Algorithm(direct_reduce_scatter, _one_per_rank),
            "ring": Algorithm(ring_reduce_scatter, _one_per_rank, ring_scratch),
        },
        "send_recv": {
            "send": Algorithm(send, rooted=True),
            "recv": Algorithm(recv, rooted=True),
        },
    }
)
"""By collective and name. Read by engine, plan, lens, docs and tests; a line here is the whole
registration."""


def find(collective: str, name: str) -> Algorithm:
    """The algorithm of that name.

    Raises:
        UsageError: there is no such collective or algorithm; the message lists those there are.
    """
    if collective not in ALGORITHMS:
        raise UsageError(f"no collective {collective!r}: there are {', '.join(ALGORITHMS)}")
    known = ALGORITHMS[collective]
    if name not in known:
        raise UsageError(f"no algorithm {name!r} for {collective}: there are {', '.join(known)}")
    return known[name]
