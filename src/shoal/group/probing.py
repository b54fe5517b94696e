"""A short measurement of the links between hosts, for a file to keep.

One rank of each host takes part. All of them send to the next host's at once and receive from the
one before, so that every NIC is in use both ways, as it will be. The slowest link counts for all.

Inside a host nothing is measured: what a message and a byte of memory take there differs little
from machine to machine, and only their ratio decides.
"""

from __future__ import annotations

import array
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from shoal.plan.cluster import LinkCost
from shoal.plan.wire import link_of, link_text

if TYPE_CHECKING:
    from shoal.group.group import Group

# So many messages of a few bytes; the fastest counts, since noise only adds.
_N_SMALL: Final = 10
_N_PEERS: Final = 3
_N_LARGE: Final = 2
# What first tells how fast a link is, and what then measures it: as much as takes this long, so
# that all of it stays below 200 ms from 10 Mbit/s on.
_FIRST_BYTES: Final = 32 << 10
_LARGE_US: Final = 8e3
_MOST_BYTES: Final = 1 << 20


def measure_links(group: Group, hosts: Sequence[int]) -> LinkCost:
    """Measure the links between the hosts; every rank of the group must call it, and gets the same.

    Takes less than 200 ms at 10 Mbit/s or more. As exact as `link_text` says it, so that a file
    keeps all of it.
    """
    leaders = [hosts.index(host) for host in range(max(hosts) + 1)]
    small_us = _exchange(group, leaders, 8, _N_SMALL)
    several_us = _exchange(group, leaders, 8, _N_SMALL, _N_PEERS)
    first_us = _exchange(group, leaders, _FIRST_BYTES, 2)
    each_us = (several_us - small_us) / (_N_PEERS - 1)
    small_us, each_us, first_us = _slowest(group, small_us, each_us, first_us - small_us)
    n_bytes = _FIRST_BYTES
    while n_bytes < _MOST_BYTES and first_us * n_bytes / _FIRST_BYTES < _LARGE_US:
        n_bytes *= 2
    (large_us,) = _slowest(group, _exchange(group, leaders, n_bytes, _N_LARGE) - small_us)
    link = LinkCost(
        latency_us=max(1.0, small_us - each_us),
        us_per_byte=large_us / n_bytes,
        message_us=each_us / 2,  # at each end
    )
    return link_of(link_text(link))


def _exchange(
    group: Group, leaders: Sequence[int], n_bytes: int, n_times: int, n_peers: int = 1
) -> float:
    """Microseconds of sending to the next hosts while receiving from the last: the best of some."""
    if group.rank not in leaders:
        return 0.0
    n, place = len(leaders), leaders.index(group.rank)
    # Of two hosts there is but one other: it gets all of the messages.
    away = [k % (n - 1) + 1 for k in range(n_peers)]
    out, into = bytearray(n_bytes), [bytearray(n_bytes) for _ in away]
    best_us = math.inf
    for _ in range(n_times):
        start_s = time.perf_counter()
        arrivals = [
            group.recv(each, leaders[place - k], work=True)
            for k, each in zip(away, into, strict=True)
        ]
        for k in away:
            group.send(out, leaders[(place + k) % n])
        for arrival in filter(None, arrivals):
            arrival.wait()
        best_us = min(best_us, (time.perf_counter() - start_s) * 1e6)
    return best_us


def _slowest(group: Group, *times_us: float) -> list[float]:
    """Each of these, of the slowest rank; at least 1 us."""
    slowest = array.array("d", [max(1.0, us) for us in times_us])
    group.all_reduce(slowest, "max")
    return list(slowest)
