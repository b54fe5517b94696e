"""How much the workers and the servers of a view reduce."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.schedule.weights import Weights


def weights_of(workers: Sequence[float], servers: Sequence[float]) -> Weights:
    """The shares with which no link carries more than it must.

    Args:
        workers, servers: by rank, the bytes that each link carries in a microsecond; 0: unknown.
    """
    n, k = len(workers), len(servers)
    if k >= n:
        return Weights((0,) * n, (1,) * k)
    return Weights((n - k,) * n, (2 * (n - 1),) * k)
