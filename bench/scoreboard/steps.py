"""All-reduces in a row, as steps of a training, during faults of servers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shoal.bench.collectives import CallSpec

if TYPE_CHECKING:
    from shoal.bench.libraries import LibraryRank

_PERIOD = 251  # of a tensor's values; a prime, so that a shifted result differs


class Steps(NamedTuple):
    """The seconds of every step, and the number of wrong results."""

    times_s: list[float]
    n_wrong: int


def steady_steps(endpoint: LibraryRank, n_bytes: int, seconds: float) -> Steps:
    """All-reduce until rank 0 ends the steps, and check every result.

    Every step has its own values, so that an old result is detected.
    """
    n_ranks, rank = len(endpoint.ranks), endpoint.rank
    data = endpoint.allocate(n_bytes // 4, "float32")
    flag = endpoint.allocate(1, "float32")
    call = endpoint.bind(CallSpec(n_bytes), data.data, data.data)
    agree = endpoint.bind(CallSpec(4), flag.data, flag.data)
    values = (np.arange(n_bytes // 4) % _PERIOD).astype(np.float32)
    times_s: list[float] = []
    n_wrong = 0
    until_s = time.monotonic() + seconds
    flag.values.fill(1)
    while flag.values[0]:
        step = len(times_s) % _PERIOD
        np.add(values, rank + step, out=data.values)
        endpoint.barrier()
        start_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start_s)
        # Integers whose sums need at most 24 bits: exact in any order.
        wanted = values * n_ranks + (n_ranks * (n_ranks - 1) // 2 + n_ranks * step)
        n_wrong += not np.array_equal(data.values, wanted)
        flag.values.fill(rank == 0 and time.monotonic() < until_s)
        agree()
    return Steps(times_s, n_wrong)
