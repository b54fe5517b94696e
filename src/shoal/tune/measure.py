"""Measures the links between a group's hosts and the time of every promising algorithm."""

from __future__ import annotations

import array
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from shoal.group.probing import measure_links
from shoal.plan.choose import can_serve, candidates, choose
from shoal.plan.cost import cost_of
from shoal.plan.planner import Planner
from shoal.plan.settings import Forced
from shoal.plan.tuning import Tuning
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

    Every rank of the group must call it with the same arguments, and gets the same result: the
    time of the slowest rank, in the lower quartile of the rounds, since other work on the machine
    only adds time. Each round measures all algorithms, so a slow phase affects all alike.

    Args:
        sizes: bytes, as `choose` counts them; multiples of 4.
        allocate: makes a float32 buffer of a number of bytes, in the kind of memory that users
            have.
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
    """The candidates that could be the fastest even if the model is far off."""
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
    """Return a call of the collective, with root 0."""
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
