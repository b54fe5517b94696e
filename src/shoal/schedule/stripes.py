"""Stripes: the parts of a buffer that are folded in an order of their own, and who reduces each.

Where a stripe lies and in which order it is folded depend on the length of the buffer and on the
number of workers, NOT on who reduces: the bits of sums do (docs/decisions/0012).
"""

from __future__ import annotations

import enum
import functools
from typing import Final, NamedTuple

from shoal.errors import UsageError

# NOT to be tuned: the bits of sums depend on it. Between hosts a shorter message costs more than
# its bytes (docs/decisions/0007); longer stripes leave fewer reducers something to do.
STRIPE_FLOOR_BYTES: Final = 16 << 10

LINE_BYTES: Final = 64
"""Chunks begin on cache lines, so that no two ranks write to the same one."""


class Role(enum.Enum):
    """What a reducer is besides: a worker brings a tensor, a server has none."""

    WORKER = "worker"
    SERVER = "server"


class Reducer(NamedTuple):
    """Whoever folds a shard, which is some of the stripes."""

    role: Role
    rank: int
    """Among those of its role."""

    def peer(self, n_workers: int) -> int:
        """What steps call it: the servers are numbered after the workers.

        Raises:
            UsageError: there is no such worker.
        """
        if self.role is Role.WORKER and self.rank >= n_workers:
            raise UsageError(f"worker {self.rank} cannot reduce: there are {n_workers} workers")
        return self.rank + n_workers * (self.role is Role.SERVER)


class Stripe(NamedTuple):
    """A part of the buffer with an order of its own."""

    chunk: int
    first: int
    """The worker that its order begins with; the one below it comes next, and so on round."""
    reducer: int
    """The peer that folds it."""


def n_stripes_of(n_bytes: int, n_workers: int) -> int:
    """One for each worker, or as many as the floor allows."""
    return max(1, min(n_workers, n_bytes // STRIPE_FLOOR_BYTES))


def first_of(stripe: int, n_workers: int, n_stripes: int) -> int:
    """The worker that the order of a stripe begins with."""
    return stripe * n_workers // n_stripes


@functools.lru_cache(maxsize=64)
def stripes_of(
    n_workers: int, reducers: tuple[Reducer, ...] = (), n_stripes: int = 0
) -> tuple[Stripe, ...]:
    """All stripes of a buffer.

    Args:
        reducers: in the order of their shards, which are equally many stripes that follow one
            another; left out: all workers.
        n_stripes: 0 for one for each worker.
    """
    n_stripes = n_stripes or n_workers
    reducers = reducers or workers(n_workers)
    shards = [t * len(reducers) // n_stripes for t in range(n_stripes)]
    return tuple(
        Stripe(t, first_of(t, n_workers, n_stripes), reducers[shard].peer(n_workers))
        for t, shard in enumerate(shards)
    )


def workers(n_workers: int, n_reducers: int = 0, n_stripes: int = 0) -> tuple[Reducer, ...]:
    """So many of the workers, each the first of the stripes of its shard; 0 for all."""
    n_stripes = n_stripes or n_workers
    n_reducers = min(n_reducers or n_workers, n_stripes)
    begins = [-(-shard * n_stripes // n_reducers) for shard in range(n_reducers)]
    return tuple(Reducer(Role.WORKER, first_of(t, n_workers, n_stripes)) for t in begins)
