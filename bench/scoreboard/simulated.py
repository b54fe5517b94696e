"""The simulator's times beside the engine's: `python -m bench.scoreboard simulated`.

Runs on labs. The simulator gets the rate of raw TCP streams in a ring and the time of an all-reduce
of 4 bytes, both measured in the same run, and the bucket of the shaper; nothing is fitted to the
compared points.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from bench.scoreboard.head import head_of
from bench.scoreboard.pools import slowest_of
from bench.scoreboard.streams import measure_streams, ring_of
from shoal.analysis.simulate.simulator import simulate
from shoal.bench.job import JobSpec
from shoal.bench.launch import Placement
from shoal.bench.machine import render_run
from shoal.bench.worker_pool import WorkerPool
from shoal.lab import Lab
from shoal.lab.cluster import BURST_BYTES
from shoal.plan.cluster import Cluster, LinkCost
from shoal.plan.defaults import WIRE, default_cluster

_ALGORITHMS: Final = ("ring", "sharded", "tree", "doubling", "halving")
_SIZES: Final = (256 << 10, 4 << 20, 25 << 20)
_SAMPLED_BYTES: Final = 8 << 20  # reduced in a round, by one call or more
_MOST_SAMPLES: Final = 5
_REST_S: Final = 0.01  # the shaper's bucket is full again after that
_STREAM_S: Final = 0.5
_GOOD: Final = 0.15


class Comparison(NamedTuple):
    """One algorithm on one lab: seconds of each round, and the simulated time."""

    n_hosts: int
    rate_mbit: float
    algorithm: str
    n_bytes: int
    rounds_s: list[float]
    simulated_s: float

    @property
    def measured_s(self) -> float:
        """The time of the fastest round, since other work on the machine only adds time."""
        return min(self.rounds_s)

    @property
    def ratio(self) -> float:
        """The measured time over the simulated: above 1 the engine is slower."""
        return self.measured_s / self.simulated_s


def compare(n_hosts: int, rate_mbit: float, n_rounds: int) -> Iterator[Comparison]:
    """Measure and simulate every algorithm and size on one lab."""
    with Lab(n_hosts, rate_mbit) as hosts:
        n_stream = int(rate_mbit * 1e6 / 8 * _STREAM_S)
        rates = [min(measure_streams(hosts, ring_of(n_hosts), n_stream)) for _ in range(3)]
        placement = Placement(cluster=hosts, program="bench.scoreboard.worker")
        with WorkerPool(JobSpec("group", n_hosts, n_hosts), placement) as pool:
            small_s = min(_times(pool, "doubling", 4) for _ in range(n_rounds))
            cluster = _describe(n_hosts, max(rates), small_s)
            print(f"# {n_hosts} hosts at {rate_mbit:g} Mbit/s: {cluster.wire}", flush=True)
            taken = {(name, n): list[float]() for n in _SIZES for name in _ALGORITHMS}
            for _ in range(n_rounds):
                for (name, n_bytes), rounds_s in taken.items():
                    rounds_s.append(_times(pool, name, n_bytes))
    for (name, n_bytes), rounds_s in taken.items():
        simulated_s = simulate("all_reduce", name, cluster, n_bytes).time_us / 1e6
        yield Comparison(n_hosts, rate_mbit, name, n_bytes, rounds_s, simulated_s)


def _describe(n_hosts: int, bytes_per_s: float, small_s: float) -> Cluster:
    """Return the simulator's description of a lab, from the time of rounds of 4 bytes."""
    round_us = small_s * 1e6 / math.log2(n_hosts)
    latency_us = max(1.0, round_us - 2 * WIRE.message_us)
    crowded = max(1.0, n_hosts / len(os.sched_getaffinity(0)))  # all hosts share these cores
    wire = LinkCost(latency_us, 1e6 / bytes_per_s, WIRE.message_us)
    cluster = default_cluster(range(n_hosts), n_cores=1, wire=wire)
    return replace(
        cluster,
        memory_us_per_byte=crowded * cluster.memory_us_per_byte,
        network_us_per_byte=crowded * cluster.network_us_per_byte,
        burst_bytes=BURST_BYTES,
    )


def _times(pool: WorkerPool, algorithm: str, n_bytes: int) -> float:
    """Return the slowest rank's median seconds of a call on idle NICs."""
    ranks = pool.ask(
        "measure",
        n_bytes=n_bytes,
        n_calls=1,
        n_samples=min(_MOST_SAMPLES, 1 + _SAMPLED_BYTES // n_bytes),
        algorithm=algorithm,
        rest_s=_REST_S,
    )
    return statistics.median(slowest_of(ranks))


def _row(point: Comparison) -> str:
    mark = "" if abs(point.ratio - 1) <= _GOOD else "  OUTSIDE"
    spread = f"{min(point.rounds_s) * 1e3:.1f} to {max(point.rounds_s) * 1e3:.1f}"
    return (
        f"{point.n_hosts:5}  {point.rate_mbit:6g}  {point.algorithm:>9}  "
        f"{point.n_bytes / 2**20:8.2f}  {point.measured_s * 1e3:8.1f}  {spread:>16}  "
        f"{point.simulated_s * 1e3:9.1f}  {point.ratio:5.2f}{mark}"
    )


def run_simulated(
    n_hosts: Sequence[int], rates_mbit: Sequence[float], n_rounds: int, command: Sequence[str]
) -> int:
    """Print a row for each point; return 0, also if some differ by more than 15 %."""
    print(render_run(head_of(command)), end="")
    print("hosts  Mbit/s  algorithm       MiB  measured  min to max of rounds  simulated  ratio")
    points = []
    for n in n_hosts:
        for rate_mbit in rates_mbit:
            for point in compare(n, rate_mbit, n_rounds):
                print(_row(point), flush=True)
                points.append(point)
    n_good = sum(abs(point.ratio - 1) <= _GOOD for point in points)
    print(f"# {n_good} of {len(points)} within {_GOOD:.0%}; times in ms")
    return 0
