"""The schedule language and every algorithm written in it. Standard library only, no I/O.

`ALGORITHMS` names all there is: `ALGORITHMS["all_reduce"]["ring"].steps(rank, size)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    "promise",
]


def _one(size: int) -> int:
    return 1


def _none(size: int) -> int:
    return 0


def _one_per_rank(size: int) -> int:
    return size


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to do a collective: what each rank does, and the chunks it needs."""

    function: Callable[..., Iterator[Step]]
    """`f(rank, size)`, or `f(rank, size, root)` where `rooted`: yields one rank's steps."""
    n_chunks: Callable[[int], int] = _one
    """By size: how many chunks the collective's longest buffer is cut into."""
    n_scratch: Callable[[int], int] = _none
    """By size: how many scratch chunks each rank needs."""
    rooted: bool = False

    def steps(self, rank: int, size: int, root: int = 0) -> Iterator[Step]:
        """The steps of `rank`. `root` is a broadcast's source, or the peer of a send or recv.

        Cost: proportional to these steps, whatever the others do.
        """
        if not (0 <= rank < size and 0 <= root < size):
            raise UsageError(f"rank {rank} and root {root} must be in [0, {size})")
        return self.function(rank, size, root) if self.rooted else self.function(rank, size)


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
