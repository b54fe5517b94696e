"""What a contestant's number is: each function makes the measure of one column."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from shoal.lab import Flow, measure_streams, ring_of

if TYPE_CHECKING:
    from shoal.bench.contest import Case, Measure
    from shoal.bench.teams import Teams

N_SUBGROUPS: Final = 64
_GIGABYTE: Final = 1e9
# Half a second of 1 Gbit/s: long against the 1 ms in which the burst of an idle cable passes.
_STREAM_BYTES: Final = 60_000_000
# Half a second of what two cores move, at 1 GB/s.
_UNSHAPED_STREAM_BYTES: Final = 500_000_000
_PRINT_PEAK: Final = """
import torch
from shoal.bench.worker import peak_resident_bytes
print(peak_resident_bytes())
"""


def time_of(library: str, memory: str = "private", algorithm: str = "") -> Measure:
    """Seconds of a call, of the slowest rank; the median over the samples of a round."""
    return lambda teams, case: teams.sample(library, case, memory, algorithm).time_s


def cpu_of(library: str) -> Measure:
    """CPU seconds (user and system) that all ranks together spend on a gigabyte of tensor."""

    def measure(teams: Teams, case: Case) -> float:
        return teams.sample(library, case).cpu_s / (case.n_bytes / _GIGABYTE)

    return measure


def memory_floor(teams: Teams, case: Case) -> float:
    """Seconds that all cores at once need to move 2nM bytes, by copying.

    Each core copies its share to and fro, source and copy together being as large as the n tensors.
    A byte read and a byte written count as two.
    """
    n_bytes = case.n_ranks * case.n_bytes // (2 * teams.n_cores) // 4 * 4
    copying = replace(case, n_ranks=teams.n_cores, n_bytes=n_bytes, n_calls=5)
    return 2 * teams.sample("copy", copying).time_s


def line_time(teams: Teams, case: Case) -> float:
    """Seconds in which one raw TCP stream carries what a ring sends per host: 2M(n-1)/n bytes."""
    return _ideal_s(teams, case, [Flow(0, 1)])


def ring_time(teams: Teams, case: Case) -> float:
    """The same at the rate of the slowest raw stream when all hosts send in a ring at once."""
    return _ideal_s(teams, case, ring_of(case.n_hosts))


def peak_of(library: str) -> Measure:
    """Peak resident bytes of the largest rank, less its tensors and what `import torch` takes.

    New processes all-reduce a quarter of the case's size, then all of it.
    """

    def measure(teams: Teams, case: Case) -> float:
        with teams.fresh(library, case) as team:
            for n_bytes in (case.n_bytes // 4, case.n_bytes):
                tensor = {"n_bytes": n_bytes, "memory": "private"}
                team.ask("check", **tensor)
                team.ask("measure", **tensor, n_calls=case.n_calls, n_samples=case.n_samples)
            peaks: list[int] = [
                rank["peak_bytes"] - rank["tensor_bytes"] for rank in team.ask("peak")
            ]
        return max(peaks) - _torch_alone()

    return measure


def start_of(library: str) -> Measure:
    """Seconds in which new processes form a group, once all of them are ready."""

    def measure(teams: Teams, case: Case) -> float:
        with teams.fresh(library, case) as team:
            return team.start_s

    return measure


def restart_of(library: str) -> Measure:
    """Seconds in which processes that left a group form another."""
    return lambda teams, case: max(rank["time_s"] for rank in teams.ask(library, case, "restart"))


def subgroups_of(library: str, *, used: bool) -> Measure:
    """Seconds of the slowest rank to form `N_SUBGROUPS` in turn, and then to use each if `used`."""

    def measure(teams: Teams, case: Case) -> float:
        counts = {"n_groups": N_SUBGROUPS, "n_members": case.n_ranks // 2}
        ranks = teams.ask(library, case, "subgroups", **counts)
        return max(float(rank["form_s"]) + used * float(rank["use_s"]) for rank in ranks)

    return measure


def _ideal_s(teams: Teams, case: Case, flows: list[Flow]) -> float:
    n_bytes = _STREAM_BYTES if case.rate_mbit else _UNSHAPED_STREAM_BYTES
    rate = min(measure_streams(teams.cluster(case.n_hosts, case.rate_mbit), flows, n_bytes))
    return 2 * case.n_bytes * (case.n_ranks - 1) / case.n_ranks / rate


def _torch_alone() -> int:
    argv = [sys.executable, "-c", _PRINT_PEAK]
    return int(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
