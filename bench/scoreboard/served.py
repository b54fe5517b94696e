"""The tables of reduction servers: workers on the first hosts of a lab, servers on the others."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from bench.scoreboard.benchmark import Benchmark, Section, Taken, columns
from bench.scoreboard.case import MIB, Case
from bench.scoreboard.goals import Below, Faster, Within
from bench.scoreboard.libraries import NARROW
from bench.scoreboard.measures import time_of
from bench.scoreboard.served_faults import (
    drain_one,
    freeze_one,
    join_one,
    kill_every,
    pauses,
    restart_to_first_use,
)
from bench.scoreboard.served_measures import (
    incast_line,
    one_stream,
    optimum,
    resent,
    served_calls,
    served_time,
    server_cpu,
)
from bench.scoreboard.table import show_count, show_cpu, show_percent, show_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.scoreboard.goals import Goal
    from bench.scoreboard.served_faults import Disturb

_SIZES: Final = (25 * MIB, 100 * MIB)
_ANSWER_S: Final = 180.0  # 16 ranks import torch, on cores that other processes use too
_FAULTS_S: Final = 60.0
_KILL_S: Final = 5.0


def show_used(is_used: float) -> str:
    """Return "used" if servers had a part in the calls, else "unused"."""
    return "used" if is_used else "unused"


def show_rate(bytes_per_s: float) -> str:
    """Return a rate in megabits per second."""
    return f"{bytes_per_s * 8 / 1e6:.0f} Mbit/s"


_SERVED: Final = Taken("shoal", partial(served_calls, "served"))
_NARROW: Final = tuple(Benchmark(wire, served_time(f"served {wire}")) for wire in NARROW)
_RESENT: Final = Taken("shoal", partial(resent, "servers alone"))
_KILLED: Final = Taken("killed", partial(pauses, kill_every(_KILL_S), _FAULTS_S))

_GLOO, _OPENMPI = columns(time_of, "gloo", "openmpi")
_SHOAL: Final = Benchmark("shoal", _SERVED.first(lambda calls: calls.time_s))
_USED: Final = Benchmark("servers", _SERVED.then(lambda calls: calls.is_used), show=show_used)
_OPTIMUM: Final = Benchmark("optimum", optimum)
_STREAM: Final = Benchmark("stream", one_stream, show=show_rate)


def _rows(
    n: int, k: int, mbit: float, goals: Sequence[Goal], slow: tuple[float, ...] = ()
) -> tuple[Case, ...]:
    """Return the rows of both sizes, with n workers and k servers."""
    nics = {"n_hosts": n, "rate_mbit": mbit, "n_servers": k, "server_mbit": slow}
    return tuple(Case(n, size, tuple(goals), n_samples=3, **nics) for size in _SIZES)  # type: ignore[arg-type]  # by name


def _near(times: float) -> Goal:
    return Within("shoal", of="optimum", times=times)


def _faster(times: float) -> tuple[Goal, ...]:
    return Faster("shoal", "gloo", times), Faster("shoal", "openmpi", times)


def _over_gloo(*times: float) -> tuple[Goal, ...]:
    return tuple(Faster(wire, "gloo", each) for wire, each in zip(NARROW, times, strict=True))


_EQUAL: Final = _rows(8, 8, 400, (_near(1.05), *_faster(1.66)))
_MANY: Final = _rows(16, 16, 200, (_near(1.06), Faster("shoal", "gloo", 1.75)))
_HALF: Final = _rows(8, 4, 400, (_near(1.06),))
_OTHERS: Final = (
    *_HALF,
    *_rows(8, 1, 400, (_near(1.06),)),
    *_rows(8, 2, 400, (_near(1.06),)),
    *_rows(8, 12, 400, (_near(1.06),)),
    *_rows(8, 4, 400, (_near(1.06),), (400, 200)),
)
_FLIGHT: Final = replace(_EQUAL[0], n_samples=2)
_FAULTS: Final = Case(4, 25 * MIB, n_hosts=4, rate_mbit=400, n_servers=4)


def _pause(label: str, disturb: Disturb, for_s: float) -> Benchmark:
    return Benchmark(label, lambda *where: pauses(disturb, for_s, *where).longest_s)


_SECTIONS: Final = (
    Section(
        "servers",
        "hosts of a lab, 8+4: 8 workers and 4 reduction servers, one call",
        (
            "gloo: torch.distributed.all_reduce; openmpi: MPI.Allreduce in place; shoal: Group",
            "optimum: the linear program's shares at the rate of stream; M over that rate where",
            "there are as many servers as workers; stream: one raw TCP stream between two workers",
            "servers: whether they had a part in the calls; the planner may leave them out",
        ),
        (_GLOO, _OPENMPI, _SHOAL, _USED, _OPTIMUM, _STREAM),
        (*_EQUAL, *_OTHERS, *_MANY),
        show=show_time,
        in_quick=lambda case: case in (*_EQUAL, _HALF[0]),
    ),
    Section(
        "servers-wire",
        "float32 sums that travel in other formats by servers",
        (
            "gloo: torch.distributed.all_reduce in float32; shoal: Group.all_reduce in float32;",
            "others: with wire=; no number where servers have no part in it",
        ),
        (_GLOO, _SHOAL, *_NARROW, _STREAM),
        (
            _rows(8, 8, 200, _over_gloo(3.3, 6.0, 9.0))[0],
            _rows(8, 8, 100, _over_gloo(3.3, 6.0, 11.0))[0],
            *_rows(8, 8, 400, (Faster("bf16", "shoal", 1.9),)),
        ),
        show=show_time,
        in_quick=lambda case: case.rate_mbit == 200,
    ),
    Section(
        "servers-flight",
        "8 buckets of 25 MiB",
        (
            "200 MiB: all 8 in flight at once; 25 MiB: 8 calls one after another, time of one",
            "optimum: their bytes at the rate of stream",
        ),
        (_SHOAL, _OPTIMUM, _STREAM),
        (
            replace(_FLIGHT, n_bytes=8 * 25 * MIB, collective="buckets", goals=(_near(1 / 0.97),)),
            replace(_FLIGHT, n_calls=8, goals=(_near(1 / 0.93),)),
        ),
        show=show_time,
        in_quick=lambda _case: False,
    ),
    Section(
        "servers-nics",
        "two NICs in each host, one at a third of the rate of the other",
        ("optimum: as above, at the sum of one raw stream over each NIC; stream: that sum",),
        (_SHOAL, _USED, _OPTIMUM, _STREAM),
        (replace(*_rows(4, 4, 400, (_near(1 / 0.95),))[:1], n_samples=3, more_mbit=(400 / 3,)),),
        show=show_time,
        in_quick=lambda _case: False,
    ),
    Section(
        "servers-incast",
        "16 workers into one server, which reduces all",
        (
            "line: 16 tensors at the rate of one raw stream",
            "resent, of all: TCP segments that were sent again meanwhile, in all hosts",
        ),
        (
            Benchmark("shoal", _RESENT.first(lambda calls: calls.time_s)),
            Benchmark("line", incast_line),
            Benchmark("resent", _RESENT.then(lambda calls: calls.n_again), show=show_count),
            Benchmark(
                "of all",
                _RESENT.then(lambda calls: calls.n_again / max(1, calls.n_sent)),
                show=show_percent,
            ),
        ),
        (
            Case(
                16,
                4 * MIB,
                (Within("shoal", of="line", times=1 / 0.95),),
                n_samples=2,
                n_hosts=16,
                rate_mbit=200,
                n_servers=1,
            ),
        ),
        show=show_time,
        in_quick=lambda _case: False,
    ),
    Section(
        "servers-faults",
        "the longest pause of a training while servers die, stop, leave and join",
        (
            f"killed: the longest pause in {_FAULTS_S:g} s in which a server is killed every",
            f"{_KILL_S:g} s, and started again 1 s later; kills, steps: their numbers",
            "stopped (SIGSTOP), drained (SIGTERM), joined: the longest pause after that",
            "a pause is the time of a step beyond the median step; a step that fails, or whose",
            "result is wrong, is reported below the table",
        ),
        (
            Benchmark("killed", _KILLED.first(lambda found: found.longest_s)),
            Benchmark("kills", _KILLED.then(lambda found: found.n_done), show=show_count),
            Benchmark("steps", _KILLED.then(lambda found: found.n_steps), show=show_count),
            _pause("stopped", freeze_one, 12.0),
            _pause("drained", drain_one, 10.0),
            _pause("joined", join_one, 10.0),
        ),
        (
            replace(
                _FAULTS,
                goals=tuple(
                    Below(label, 2.0) for label in ("killed", "stopped", "drained", "joined")
                ),
            ),
        ),
        show=show_time,
        in_rounds=False,
        in_quick=lambda _case: False,
    ),
    Section(
        "servers-cpu",
        "CPU seconds, user and system, of a server for a gigabyte that it folds and sends back",
        ("16 workers, one server that reduces all; NICs are not shaped",),
        (Benchmark("server", server_cpu("servers alone")),),
        (
            Case(
                16,
                25 * MIB,
                (Below("server", 0.5),),
                n_samples=3,
                n_hosts=16,
                rate_mbit=None,
                n_servers=1,
            ),
        ),
        show=show_cpu,
        in_quick=lambda _case: False,
    ),
    Section(
        "servers-restart",
        "from the start of a server's process until calls reach it",
        ("the median of 3 restarts, while workers all-reduce 4 MiB again and again",),
        (Benchmark("first use", restart_to_first_use(3)),),
        (replace(_FAULTS, n_bytes=4 * MIB, goals=(Below("first use", 1.0),)),),
        show=show_time,
        in_rounds=False,
    ),
)

SERVED_SECTIONS: Final = tuple(
    replace(one, part_of="servers", answer_s=_ANSWER_S, is_large=True) for one in _SECTIONS
)
