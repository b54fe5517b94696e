"""Stripes: the parts of a buffer that each have their own order of folds and their own reducer.

The place of a stripe and its order depend on the length of the buffer and on the number of workers,
NOT on the reducers: the bits of sums follow from them (docs/decisions/0012).
"""

from __future__ import annotations

import functools
from typing import Final, NamedTuple

# NOT to be tuned: the bits of sums depend on it. Between hosts a shorter message costs more than
# its bytes (docs/decisions/0007); with longer stripes fewer ranks reduce.
STRIPE_FLOOR_BYTES: Final = 16 << 10

LINE_BYTES: Final = 64
"""Chunks begin on cache lines, so that no two ranks write to the same one."""


class Stripe(NamedTuple):
    """A part of the buffer with its own order of folds."""

    chunk: int
    first: int
    """The first worker in its order; the worker below it comes next, and so on round."""
    reducer: int
    """The rank that folds it; servers are numbered after the workers."""


def n_stripes_of(n_bytes: int, n_workers: int) -> int:
    """The number of stripes: one for each worker, or as many as the floor allows."""
    return max(1, min(n_workers, n_bytes // STRIPE_FLOOR_BYTES))


def first_of(stripe: int, n_workers: int, n_stripes: int) -> int:
    """The first worker in the order of a stripe."""
    return stripe * n_workers // n_stripes


@functools.lru_cache(maxsize=64)
def stripes_of(n_workers: int, n_reducers: int = 0, n_stripes: int = 0) -> tuple[Stripe, ...]:
    """Return all stripes of a buffer.

    Args:
        n_reducers: workers that reduce, each a shard of equally many consecutive stripes that
            begins with the stripe whose order begins with it; 0 for all.
        n_stripes: 0 for one for each worker.
    """
    n_stripes = n_stripes or n_workers
    n_reducers = min(n_reducers or n_workers, n_stripes)
    firsts = [first_of(stripe, n_workers, n_stripes) for stripe in range(n_stripes)]
    shards = [stripe * n_reducers // n_stripes for stripe in range(n_stripes)]
    begins = [-(-shard * n_stripes // n_reducers) for shard in shards]
    return tuple(
        Stripe(stripe, first, firsts[begin])
        for stripe, (first, begin) in enumerate(zip(firsts, begins, strict=True))
    )
