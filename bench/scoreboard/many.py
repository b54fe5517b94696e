"""The tables of many more ranks than cores: the cost of a rank."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from bench.scoreboard.benchmark import Section, columns
from bench.scoreboard.case import MIB, Case
from bench.scoreboard.goals import Faster, Within
from bench.scoreboard.measures import start_of, time_of
from bench.scoreboard.table import show_count, show_memory, show_time

if TYPE_CHECKING:
    from bench.scoreboard.benchmark import Measure
    from bench.scoreboard.pools import WorkerPools

_N_RANKS: Final = 128
_AT_LEAST_AS_FAST: Final = (Faster("shoal", than="gloo", times=1),)
_CASE: Final = Case(_N_RANKS, MIB, n_calls=1, n_samples=2)


def _footprint_of(what: str, library: str) -> Measure:
    """Return the mean over the ranks after an all-reduce: bytes, or descriptors."""

    def measure(pools: WorkerPools, case: Case) -> float:
        pools.sample(library, case)
        ranks = pools.ask(library, case, "footprint")
        return float(sum(rank[what] for rank in ranks)) / len(ranks)

    return measure


MANY_SECTIONS: Final = (
    Section(
        "many",
        f"{_N_RANKS} ranks in one host, all-reduce",
        (
            "the ranks are forks of one process that has imported torch",
            "calls in a row after a barrier, slowest rank, time per call",
        ),
        columns(time_of, "gloo", "shoal"),
        (
            Case(_N_RANKS, 4, _AT_LEAST_AS_FAST, n_calls=5, n_samples=3),
            replace(_CASE, goals=_AT_LEAST_AS_FAST),
        ),
        show_time,
    ),
    Section(
        "many-start",
        f"{_N_RANKS} ranks in one host: forming the group",
        (
            "init_process_group in new processes, from when all are ready; slowest rank;",
            "shoal's part begins with loading it, Gloo is loaded with torch",
        ),
        columns(start_of, "gloo", "shoal"),
        (replace(_CASE, n_bytes=0, goals=_AT_LEAST_AS_FAST),),
        show_time,
    ),
    Section(
        "many-memory",
        f"{_N_RANKS} ranks in one host: memory of a rank, the mean",
        ("Pss after an all-reduce of 1 MiB: a page of several processes counts in part in each",),
        columns(partial(_footprint_of, "pss_bytes"), "gloo", "shoal"),
        (replace(_CASE, goals=(Within("shoal", of="gloo", times=1),)),),
        show_memory,
        in_rounds=False,
    ),
    Section(
        "many-descriptors",
        f"{_N_RANKS} ranks in one host: descriptors of a rank, the mean",
        ("open after an all-reduce of 1 MiB, including the interpreter's",),
        columns(partial(_footprint_of, "n_fds"), "gloo", "shoal"),
        (replace(_CASE, goals=(Within("shoal", of="gloo", times=0.5),)),),
        show_count,
        in_rounds=False,
    ),
)
