"""Measures the links between a group's hosts and the time of every promising algorithm."""

from __future__ import annotations

import array
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shoal.plan.choose import can_serve, candidates, choose
from shoal.plan.cluster import LinkCost
from shoal.plan.cost import cost_of
from shoal.plan.planner import Planner
from shoal.plan.settings import Forced
from shoal.plan.tuning import Tuning
from shoal.plan.wire import link_of, link_text
from shoal.schedule import ALGORITHMS, COLLECTIVES, Blocks

if TYPE_CHECKING:
    from shoal.group.group import Group

MEASURED: Final = tuple(name for name, known in ALGORITHMS.items() if len(known) > 1)
"""The collectives that have several algorithms."""

# Algorithms that take this many times as long as the best in the model are not measured.
_HOPELESS: Final = 8.0
# A sample is as many calls in a row as move this many bytes, at most _MOST_CALLS.
_SAMPLE_BYTES: Final = 1 << 20
_MOST_CALLS: Final = 20

# Small messages of each kind; the fastest counts, since noise only adds.
_N_SMALL: Final = 10
_N_PEERS: Final = 3
_N_LARGE: Final = 2
# The first message shows the rate of a link, and messages of this time then measure it, so that all
# of them take less than 200 ms from 10 Mbit/s on.
_FIRST_BYTES: Final = 32 << 10
_LARGE_US: Final = 8e3
_MOST_BYTES: Final = 1 << 20

Progress = Callable[[str], None]
Allocate = Callable[[int], Any]


def measure_group(
    group: Group,
    collectives: Sequence[str],
    sizes: Sequence[int],
    n_rounds: int,
    allocate: Allocate,
    progress: Progress = lambda _: None,
) -> Tuning:
    """Measure the links between hosts, and all promising algorithms at these sizes.

    Every rank of the group must call it with the same arguments, and gets the same result: the time
    of the slowest rank, in the lower quartile of the rounds, since other work on the machine only
    adds time. Each round measures all algorithms, so a slow phase affects all equally. Sizes are
    bytes as in `choose`, multiples of 4; `allocate` makes a float32 buffer as users do.
    """
    first = planner = group.planner
    times: dict[str, dict[int, dict[str, float]]] = {}
    link = None
    if planner.cluster.n_hosts > 1:
        progress("links between hosts")
        link = measure_links(group, planner.cluster.hosts)
        planner = Planner(replace(planner.cluster, wire=link))
    try:
        for collective in collectives:
            times[collective] = {}
            for n_bytes in sizes:
                progress(f"{collective} of {n_bytes} B")
                names = list(sensible(collective, n_bytes, planner))
                call = _call(group, collective, n_bytes, allocate)
                times[collective][n_bytes] = _compare(
                    group, call, [(collective, name) for name in names], n_bytes, n_rounds
                )
    finally:
        group.plan_by(first)
    return Tuning(planner.cluster.hosts, planner.cluster.n_cores, times, link=link)


def sensible(collective: str, n_bytes: int, planner: Planner) -> Iterator[str]:
    """Yield the candidates that could be the fastest even if the model is inaccurate."""
    cluster = planner.cluster
    best_us = choose(collective, n_bytes, cluster).cost_us
    for name in candidates(collective, n_bytes, cluster):
        if not can_serve(collective, name, cluster):
            continue
        if cost_of(collective, name, n_bytes, cluster).cost_us <= _HOPELESS * best_us:
            yield name


def _compare(
    group: Group,
    call: Callable[[], object],
    algorithms: Sequence[tuple[str, str]],
    n_bytes: int,
    n_rounds: int,
) -> dict[str, float]:
    n_calls = max(1, min(_MOST_CALLS, _SAMPLE_BYTES // n_bytes))
    planners = [
        Planner(
            group.planner.cluster,
            Forced(by_collective=(algorithm,)),
            n_channels=group.planner.n_channels,
        )
        for algorithm in algorithms
    ]
    samples = array.array("d")
    for _ in range(n_rounds):
        for planner in planners:
            group.plan_by(planner)
            call()  # plans are made, and caches have seen these buffers
            group.barrier()
            start_s = time.perf_counter()
            for _ in range(n_calls):
                call()
            samples.append((time.perf_counter() - start_s) * 1e6 / n_calls)
    group.all_reduce(samples, "max")
    by_place = [sorted(samples[place :: len(planners)]) for place in range(len(planners))]
    return {name: us[len(us) // 4] for (_, name), us in zip(algorithms, by_place, strict=True)}


def _call(group: Group, collective: str, n_bytes: int, allocate: Allocate) -> Callable[[], object]:
    row, call = COLLECTIVES[collective], getattr(group, collective)
    if row.in_place:
        return functools.partial(call, allocate(n_bytes))
    n_blocks = {
        Blocks.OWN: 1,
        Blocks.ALL: group.size,
        Blocks.AT_ROOT: group.size * (group.rank == 0),
    }
    output, inputs = (n_blocks[which] * n_bytes for which in (row.writes, row.reads))
    return functools.partial(
        call, allocate(output) if output else None, allocate(inputs) if inputs else None
    )


def measure_links(group: Group, hosts: Sequence[int]) -> LinkCost:
    """Measure the links between hosts; every rank of the group must call it, and gets the same.

    One rank of each host sends to the next host and receives from the one before, all at once, so
    every NIC is busy both ways. The slowest link counts. Takes less than 200 ms at 10 Mbit/s or
    more. The result has the digits of `link_text`, so a file keeps it exactly.
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
    """Return the least microseconds of sending to the next hosts and receiving from the last."""
    if group.rank not in leaders:
        return 0.0
    n, place = len(leaders), leaders.index(group.rank)
    # With two hosts, the other one gets all messages.
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
    slowest = array.array("d", [max(1.0, us) for us in times_us])
    group.all_reduce(slowest, "max")
    return list(slowest)
