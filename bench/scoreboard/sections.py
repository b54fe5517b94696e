"""The tables of the project, as data. A new line here is a new number in every run and in the log.

The goals are the project's own, set before the code was written; a goal that is missed stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from bench.scoreboard.benchmark import Benchmark, Measure, Section, columns
from bench.scoreboard.between import HOST_SECTIONS
from bench.scoreboard.case import MIB, Case
from bench.scoreboard.choices import (
    choice_benchmarks,
    choice_cases,
    choice_lines,
    choice_verdicts,
    is_choice_open,
)
from bench.scoreboard.goals import Below, Faster, Goal, Within
from bench.scoreboard.grid import grid_cases, grid_lines, grid_verdicts, in_quick_grid, is_close
from bench.scoreboard.many import MANY_SECTIONS
from bench.scoreboard.measures import (
    N_SUBGROUPS,
    cpu_of,
    memory_floor,
    peak_of,
    restart_of,
    start_of,
    subgroups_of,
    time_of,
)
from bench.scoreboard.pools import WorkerPools
from bench.scoreboard.served import SERVED_SECTIONS
from bench.scoreboard.table import show_cpu, show_memory, show_time
from bench.scoreboard.training import TRAINING_SECTIONS

_KIB: Final = 1024

_GLOO, _OPENMPI, _SHOAL, _GROUP = columns(time_of, "gloo", "openmpi", "shoal", "group")
_EMPTY: Final = Benchmark("shoal.empty", time_of("shoal", "shared"))
_FLOOR: Final = Benchmark("floor", memory_floor)


def _small(n_bytes: int, n_ranks: int, *extra: Goal) -> Case:
    goals = (Faster("shoal", "gloo", 3 if n_ranks == 2 else 5), *extra)
    return Case(n_ranks, n_bytes, goals, n_calls=100, n_samples=3)


def _private(n_ranks: int, n_bytes: int, times_openmpi: float, n_samples: int) -> Case:
    goals = (Faster("shoal", "gloo", 4), Faster("shoal", "openmpi", times_openmpi))
    return Case(n_ranks, n_bytes, goals, n_samples=n_samples)


def _shared(n_ranks: int, n_bytes: int, n_samples: int) -> Case:
    goals: list[Goal] = [Within("shoal.empty", "floor", 1.5)]
    if n_ranks == 4:
        goals.insert(0, Faster("shoal.empty", "openmpi", 3))
    return Case(n_ranks, n_bytes, tuple(goals), n_samples=n_samples)


_STARTS: Final[Mapping[str, Callable[[str], Measure]]] = {
    "init": start_of,
    "again": restart_of,
    "groups": partial(subgroups_of, used=False),
    "used": partial(subgroups_of, used=True),
}

SECTIONS: Final = (
    Section(
        "private",
        "one host, tensors in private memory",
        (
            "gloo, shoal: torch.distributed.all_reduce; openmpi: MPI.Allreduce in place, on NumPy",
            "one call after a barrier, slowest rank",
        ),
        (_GLOO, _OPENMPI, _SHOAL),
        (
            _private(2, 25 * MIB, 1.0, 7),
            _private(2, 100 * MIB, 1.3, 3),
            _private(4, 25 * MIB, 1.3, 5),
            _private(4, 100 * MIB, 1.3, 3),
        ),
        show_time,
    ),
    Section(
        "shared",
        "one host, tensors from shoal.empty",
        (
            "openmpi as above; floor: moving 2nM bytes by numpy.copyto on all cores at once,",
            "half of them read and half written, source and copy as large as the n tensors",
        ),
        (_OPENMPI, _EMPTY, _FLOOR),
        (
            _shared(2, 25 * MIB, 7),
            _shared(2, 100 * MIB, 3),
            _shared(4, 25 * MIB, 5),
            _shared(4, 100 * MIB, 3),
        ),
        show_time,
    ),
    Section(
        "medium",
        "one host, 1 MiB",
        ("10 calls in a row after a barrier, slowest rank, time per call",),
        (_GLOO, _OPENMPI, _SHOAL, _EMPTY),
        (
            Case(2, MIB, (), n_calls=10),
            Case(4, MIB, (Faster("shoal", than="gloo", times=5),), n_calls=10),
        ),
        show_time,
    ),
    Section(
        "small",
        "one host, small tensors",
        (
            "gloo, shoal: torch.distributed.all_reduce; group: shoal's Group.all_reduce on NumPy",
            "100 calls in a row after a barrier, slowest rank, time per call",
        ),
        (_GLOO, _OPENMPI, _SHOAL, _GROUP),
        (
            _small(4, 2, Below("group", 20e-6)),
            _small(_KIB, 2),
            _small(16 * _KIB, 2),
            _small(64 * _KIB, 2),
            _small(4, 4),
            _small(64 * _KIB, 4),
            _small(4, 8),
            _small(64 * _KIB, 8),
        ),
        show_time,
    ),
    *HOST_SECTIONS,
    Section(
        "cpu",
        "CPU seconds (user and system, all ranks) per gigabyte of tensor, private memory",
        ("10 calls in a row after a barrier; waiting that spins counts as work",),
        columns(cpu_of, "gloo", "openmpi", "shoal"),
        (Case(2, 25 * MIB, (Faster("shoal", than="gloo", times=1),), n_calls=10, n_samples=2),),
        show_cpu,
    ),
    Section(
        "memory",
        "peak resident memory of a rank (VmHWM), less its tensors and `import torch`",
        (
            "new processes, all-reduce of 25 MiB, then 100 MiB, private memory; the largest rank",
            "a page shared between ranks counts in each rank that has touched it",
        ),
        columns(peak_of, "gloo", "shoal"),
        (
            Case(2, 100 * MIB, (Below("shoal", 60 * MIB),), n_samples=3),
            Case(4, 100 * MIB, (Below("shoal", 60 * MIB),), n_samples=3),
        ),
        show_memory,
        in_rounds=False,
    ),
    Section(
        "collectives",
        "every collective of torch.distributed, float32, private memory",
        (
            "a cell is shoal's time and how many times as long Gloo takes; LOSS where that is less",
            "than 1, ? where the middle half of the rounds disagrees on who is faster",
            "size: of a rank's larger tensor if its two differ (all_gather: the output)",
            "calls in a row after a barrier, 10 ms of them (hosts: 40 ms; --quick: 4 and 16 ms),",
            "slowest rank, time per call; send_recv: ranks in pairs, there and back;",
            "hosts: a rank each, 1 Gbit/s, up to 16 MiB (--quick: 1 MiB): more takes too long",
        ),
        (_GLOO, _SHOAL),
        grid_cases(),
        show_time,
        in_quick=in_quick_grid,
        is_open=is_close,
        layout=grid_lines,
        verdicts=grid_verdicts,
    ),
    Section(
        "planner",
        "the planner's choice beside every algorithm, tensors as above",
        (
            "a cell is the choice and how many times as long it takes as the best of the others;",
            "WRONG where that is more than 1.1, ? where the middle half of the rounds disagrees;",
            "one host up to 64 MiB, four hosts at 1 Gbit/s up to 1 MiB",
        ),
        choice_benchmarks(),
        choice_cases(),
        show_time,
        in_quick=in_quick_grid,
        is_open=is_choice_open,
        note=WorkerPools.choice,
        layout=choice_lines,
        verdicts=choice_verdicts,
    ),
    Section(
        "start",
        f"one host, forming the group and {N_SUBGROUPS} subgroups",
        (
            "init: init_process_group in new processes, from when all are ready; slowest rank",
            "again: the same in the same processes, after they destroyed the group",
            f"groups: {N_SUBGROUPS} times new_group, each of half of the ranks; used: the same and",
            "then a barrier on each of them",
        ),
        tuple(
            Benchmark(f"{library} {what}", measure_of(library))
            for what, measure_of in _STARTS.items()
            for library in ("gloo", "shoal")
        ),
        tuple(
            Case(n_ranks, 0, tuple(Faster(f"shoal {w}", f"gloo {w}", 1) for w in _STARTS))
            for n_ranks in (4, 8)
        ),
        show_time,
        in_quick=lambda case: case.n_ranks == 8,
    ),
    *SERVED_SECTIONS,
    *TRAINING_SECTIONS,
    *MANY_SECTIONS,
)
