"""A short measurement of the links between hosts.

One rank of each host takes part. All of them send to the next host's at once and receive from the
one before, so that every cable is in use both ways, as it will be. The slowest link counts for all.

Inside a host nothing is measured: what a message and a byte of memory take there differs little
from machine to machine, and only their ratio decides.
"""

from __future__ import annotations

import array
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from shoal.plan.cluster import LinkCost

if TYPE_CHECKING:
    from shoal.plan.ranks import Group

# So many messages of a few bytes; the fastest counts, since noise only adds.
_N_SMALL: Final = 10
_N_PEERS: Final = 3
_N_LARGE: Final = 2
# What first tells how fast a link is, and what then measures it: as much as takes this long, so
# that all of it stays below 200 ms from 10 Mbit/s on.
_FIRST_BYTES: Final = 32 << 10
_LARGE_US: Final = 8e3
_MOST_BYTES: Final = 1 << 20
_MIB: Final = 1 << 20


class Measured(NamedTuple):
    """The slowest link between hosts, in steps of a factor of the square root of two.

    So coarse that noise seldom changes a choice, and in integers so that all ranks say the same.

    Args:
        latency: of a few bytes, in steps above 1 us.
        message: of each further one of some that go to different hosts at a time; the same.
        per_mib: of a MiB; the same.
    """

    latency: int
    message: int
    per_mib: int

    @property
    def code(self) -> int:
        """All in one number above 0, to compare with other ranks'."""
        return self.latency << 32 | self.message << 16 | self.per_mib | 1 << 62

    def link(self) -> LinkCost:
        """The costs of a wire as measured."""
        message_us = _of_steps(self.message) / 2  # at each end
        return LinkCost(
            latency_us=max(1.0, _of_steps(self.latency) - 2 * message_us),
            us_per_byte=_of_steps(self.per_mib) / _MIB,
            message_us=message_us,
        )


def measure(group: Group, hosts: Sequence[int]) -> Measured:
    """Measure the links between the hosts; every rank of the group must call it, and gets the same.

    Takes less than 200 ms at 10 Mbit/s or more.
    """
    leaders = [hosts.index(host) for host in range(max(hosts) + 1)]
    small_us = _exchange(group, leaders, 8, _N_SMALL)
    several_us = _exchange(group, leaders, 8, _N_SMALL, _N_PEERS)
    first_us = _exchange(group, leaders, _FIRST_BYTES, 2)
    each_us = (several_us - small_us) / (_N_PEERS - 1)
    latency, message, first = _slowest(group, small_us, each_us, first_us - small_us)
    n_bytes = _FIRST_BYTES
    while n_bytes < _MOST_BYTES and _of_steps(first) * n_bytes / _FIRST_BYTES < _LARGE_US:
        n_bytes *= 2
    large_us = _exchange(group, leaders, n_bytes, _N_LARGE)
    (per_mib,) = _slowest(group, (large_us - small_us) * _MIB / n_bytes)
    return Measured(latency, message, per_mib)


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
        for arrival in arrivals:
            arrival.wait()
        best_us = min(best_us, (time.perf_counter() - start_s) * 1e6)
    return best_us


def _slowest(group: Group, *times_us: float) -> list[int]:
    """Each of these, of the slowest rank, in steps."""
    # Rounded before they are compared: logarithms may differ in the last bit from host to host.
    steps = array.array("q", [round(2 * math.log2(max(1.0, us))) for us in times_us])
    group.all_reduce(steps, "max")
    return list(steps)


def _of_steps(steps: int) -> float:
    return float(1 << steps // 2) * (1.4142135623730951 if steps % 2 else 1.0)
