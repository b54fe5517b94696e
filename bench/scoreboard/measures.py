"""The measures of columns: each function makes one."""

from __future__ import annotations

import statistics
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bench.scoreboard.benchmark import Taken
from bench.scoreboard.pools import slowest_of
from bench.scoreboard.streams import (
    STREAM_BYTES,
    UNSHAPED_STREAM_BYTES,
    Flow,
    measure_streams,
    ring_of,
)
from shoal.bench.job import Failure
from shoal.lab.cluster import interface_of

if TYPE_CHECKING:
    from bench.scoreboard.benchmark import Measure
    from bench.scoreboard.case import Case
    from bench.scoreboard.pools import WorkerPools

N_SUBGROUPS: Final = 64
_GIGABYTE: Final = 1e9
_BULK_BYTES: Final = 100 << 20
_PRINT_PEAK: Final = """
import torch
from bench.scoreboard.worker import peak_resident_bytes
print(peak_resident_bytes())
"""


def time_of(library: str, memory: str = "private", algorithm: str = "") -> Measure:
    """Measure the seconds of a call on the slowest rank, the median of the samples of a round."""
    return lambda pools, case: pools.sample(library, case, memory, algorithm).time_s


def cpu_of(library: str) -> Measure:
    """Measure the CPU seconds of all ranks together for a gigabyte of tensor."""

    def measure(pools: WorkerPools, case: Case) -> float:
        return pools.sample(library, case).cpu_s / (case.n_bytes / _GIGABYTE)

    return measure


def time_and_cores(library: str) -> tuple[Measure, Measure]:
    """Measure the seconds of a call, and the part of all cores that the same calls kept busy."""
    calls = Taken(library, lambda pools, case: (pools.sample(library, case), pools.n_cores))
    return (
        calls.first(lambda call: call[0].time_s),
        calls.then(lambda call: call[0].cpu_s / call[0].time_s / call[1]),
    )


def memory_floor(pools: WorkerPools, case: Case) -> float:
    """Measure the seconds that all cores together take to copy 2nM bytes.

    Each core copies its share to and fro; source and copy are as large as the n tensors together.
    A byte read and a byte written count as two.
    """
    n_bytes = case.n_ranks * case.n_bytes // (2 * pools.n_cores) // 4 * 4
    copying = replace(case, n_ranks=pools.n_cores, n_bytes=n_bytes, n_calls=5)
    return 2 * pools.sample("copy", copying).time_s


def line_time(pools: WorkerPools, case: Case) -> float:
    """Measure the seconds of 2M(n-1)/n bytes, a ring's per host, over one raw TCP stream."""
    return sent_by_ring(case) / raw_rate(pools, case, [Flow(0, 1)])


def ring_time(pools: WorkerPools, case: Case) -> float:
    """Measure `line_time` at the slowest raw stream's rate while all hosts send in a ring."""
    return sent_by_ring(case) / raw_rate(pools, case, ring_of(case.n_hosts))


def nics_time(pools: WorkerPools, case: Case) -> float:
    """Measure `line_time` at the rate of raw streams in rings over all NICs of a host at once."""
    cluster = pools.cluster(case)
    n_nics = 1 + len(case.more_mbit)
    ring = ring_of(case.n_hosts)
    flows = [flow._replace(nic=nic) for nic in range(n_nics) for flow in ring]
    rates = measure_streams(cluster, flows, STREAM_BYTES // n_nics)
    by_nic = [rates[at : at + len(ring)] for at in range(0, len(rates), len(ring))]
    return sent_by_ring(case) / sum(map(min, by_nic))


def latencies(library: str, n_bulk: int) -> tuple[Measure, Measure]:
    """Measure 4 B all-reduces beside `n_bulk` large ones in flight: median and 99th percentile.

    Each call counts on its slowest rank.
    """
    what = {"n_bulk": n_bulk, "bulk_bytes": _BULK_BYTES}
    calls = Taken(
        library, lambda pools, case: slowest_of(pools.ask(library, case, "latencies", **what))
    )
    return (
        calls.first(statistics.median),
        calls.then(lambda times_s: sorted(times_s)[len(times_s) * 99 // 100]),
    )


def among_strangers(library: str, n_held: int, n_short: int) -> Measure:
    """Measure the slowest rank's median call while strangers connect to rank 0.

    Raises:
        Failure: fewer than `n_short` connections were made.
    """

    def measure(pools: WorkerPools, case: Case) -> float:
        what = {"n_bytes": case.n_bytes, "n_held": n_held, "n_short": n_short}
        ranks = pools.ask(library, case, "calls_among_strangers", **what)
        n_made = sum(rank["n_made"] for rank in ranks)
        if n_made < n_short:
            raise Failure(f"only {n_made} of {n_short} strangers got through to the listener")
        return statistics.median(slowest_of(ranks))

    return measure


def added_by_cut(library: str) -> Measure:
    """Measure the seconds added to a call during which a NIC of the second host is cut.

    The cut takes the last NIC: for a second if there are others, else for two.
    """

    def measure(pools: WorkerPools, case: Case) -> float:
        what = {
            "n_bytes": case.n_bytes,
            "n_calls": case.n_calls,
            "interface": interface_of(len(case.more_mbit)),
            "down_s": 1.0 if case.more_mbit else 2.0,
        }
        ranks = pools.ask(library, case, "cut_calls", **what)
        return max(statistics.fmean(rank["cut_s"]) - float(rank["median_s"]) for rank in ranks)

    return measure


def peak_of(library: str) -> Measure:
    """Measure the largest rank's peak resident bytes without its tensors and `import torch`.

    New processes all-reduce a quarter of the case's size, then all of it.
    """

    def measure(pools: WorkerPools, case: Case) -> float:
        with pools.fresh(library, case) as pool:
            for n_bytes in (case.n_bytes // 4, case.n_bytes):
                tensor = {"n_bytes": n_bytes, "memory": "private"}
                pool.ask("check", **tensor)
                pool.ask("measure", **tensor, n_calls=case.n_calls, n_samples=case.n_samples)
            peaks: list[int] = [
                rank["peak_bytes"] - rank["tensor_bytes"] for rank in pool.ask("peak")
            ]
        return max(peaks) - _torch_alone()

    return measure


def start_of(library: str) -> Measure:
    """Measure the seconds in which new, ready processes form a group."""

    def measure(pools: WorkerPools, case: Case) -> float:
        with pools.fresh(library, case) as pool:
            return max(float(rank["start_s"]) for rank in pool.ask("started"))

    return measure


def restart_of(library: str) -> Measure:
    """Measure the seconds in which processes that left a group form another."""
    return lambda pools, case: max(rank["time_s"] for rank in pools.ask(library, case, "restart"))


def subgroups_of(library: str, *, used: bool) -> Measure:
    """Measure the slowest rank's seconds to form `N_SUBGROUPS`, and to use each if `used`."""

    def measure(pools: WorkerPools, case: Case) -> float:
        counts = {"n_groups": N_SUBGROUPS, "n_members": case.n_ranks // 2}
        ranks = pools.ask(library, case, "subgroups", **counts)
        return max(float(rank["form_s"]) + used * float(rank["use_s"]) for rank in ranks)

    return measure


def raw_rate(pools: WorkerPools, case: Case, flows: list[Flow]) -> float:
    """Return the bytes per second of the slowest of simultaneous raw TCP streams."""
    n_bytes = STREAM_BYTES if case.rate_mbit else UNSHAPED_STREAM_BYTES
    return min(measure_streams(pools.cluster(case), flows, n_bytes))


def sent_by_ring(case: Case) -> float:
    """Return the bytes that each rank sends in a ring's all-reduce, the least possible."""
    return 2 * case.n_bytes * (case.n_ranks - 1) / case.n_ranks


def _torch_alone() -> int:
    argv = [sys.executable, "-c", _PRINT_PEAK]
    return int(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
