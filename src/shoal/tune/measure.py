"""The real time of every sensible algorithm, measured on the ranks of a group, and their links."""

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

# Algorithms that the model gives so many times the time of the best are not worth measuring.
_HOPELESS: Final = 8.0
# A sample is a few calls in a row; as many as move this.
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
    """Measure the links between hosts, and all sensible algorithms at these sizes.

    Every rank of the group must call it with the same arguments, and gets the same result: the
    slowest rank's time, in the lower quartile of the rounds: others' work only adds to it. In each
    round all algorithms take their turn, so that a machine that slows down is slow for all.

    Args:
        sizes: bytes, as `choose` counts them; multiples of 4.
        allocate: makes float32 of so many bytes, in memory as users have it.
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
    """The candidates that could be the fastest, even if the model is wrong by a good deal."""
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
    """A call of that collective; all roots are rank 0."""
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
