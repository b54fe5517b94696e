"""The tables of ranks on several hosts: network namespaces, whose NICs are shaped or not."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from bench.scoreboard.benchmark import Benchmark, Section, columns
from bench.scoreboard.case import MIB, Case
from bench.scoreboard.goals import Below, Faster, Goal, Within
from bench.scoreboard.iperf import iperf_time
from bench.scoreboard.libraries import NARROW
from bench.scoreboard.measures import (
    added_by_cut,
    among_strangers,
    cpu_of,
    latencies,
    line_time,
    nics_time,
    peak_of,
    ring_time,
    time_and_cores,
    time_of,
)
from bench.scoreboard.table import show_cpu, show_memory, show_percent, show_time

_GLOO, _SHOAL = columns(time_of, "gloo", "shoal")
_TIMED: Final = {library: time_and_cores(library) for library in ("group", *NARROW)}
_RING: Final = Benchmark("ring", ring_time)
_IPERF: Final = Benchmark("iperf3", iperf_time, enters=lambda case: case.n_hosts == 2)


def _unshaped(n_hosts: int, n_bytes: int) -> Case:
    times = 1.2 if n_hosts == 2 or n_bytes == 25 * MIB else 1
    goals: list[Goal] = [Faster("shoal", than="gloo", times=times)]
    if n_hosts == 2:
        goals.append(Within("shoal", of="iperf3", times=1 / 0.75))
    return Case(n_hosts, n_bytes, tuple(goals), n_samples=3, n_hosts=n_hosts, rate_mbit=None)


_UNSHAPED: Final = tuple(
    _unshaped(n_hosts, n_bytes) for n_hosts in (2, 4, 8) for n_bytes in (25 * MIB, 256 * MIB)
)
_TWO_UNSHAPED: Final = replace(_UNSHAPED[0], goals=(Faster("shoal", than="gloo", times=1),))


def _latencies(library: str) -> list[Benchmark]:
    columns = []
    for name, n_bulk in ((f"{library} alone", 0), (f"{library} mixed", 2)):
        median, percentile_99 = latencies(library, n_bulk)
        columns += [Benchmark(name, median), Benchmark(f"{name} p99", percentile_99)]
    return columns


def _narrow(mbit: float, *times: float) -> Case:
    """Return four hosts, on which each wire of `NARROW` should be `times` as fast as float32."""
    goals = tuple(Faster(wire, "group", each) for wire, each in zip(NARROW, times, strict=True))
    return Case(4, 25 * MIB, goals, n_samples=3, n_hosts=4, rate_mbit=mbit)


HOST_SECTIONS: Final = (
    Section(
        "hosts",
        "four hosts, 1 Gbit/s (network namespaces, tbf on both ends of every NIC)",
        (
            "line: 2M(n-1)/n bytes at the rate of one raw TCP stream of this run",
            "ring: as line, at the slowest stream's rate while all hosts send in a ring",
        ),
        (_GLOO, _SHOAL, Benchmark("line", line_time), _RING),
        (
            Case(
                4,
                25 * MIB,
                (Faster("shoal", than="gloo", times=1), Within("shoal", of="line", times=1.08)),
                n_samples=3,
                n_hosts=4,
            ),
        ),
        show_time,
    ),
    Section(
        "wire",
        "four hosts: float32 sums that travel in other formats",
        (
            "group: shoal's Group.all_reduce on NumPy; others: the same with wire=",
            "cores: the share of this machine's cores that the ranks kept busy in these calls",
            "ring: 2M(n-1)/n bytes of float32 at the rate of raw TCP streams in a ring",
        ),
        (
            *(Benchmark(library, time) for library, (time, _) in _TIMED.items()),
            *(
                Benchmark(f"{library}'s cores", cores, show=show_percent)
                for library, (_, cores) in _TIMED.items()
            ),
            _RING,
        ),
        (_narrow(400, 1.9, 3.6, 6.5), _narrow(1000, 1.9, 2.7, 4.0)),
        show_time,
    ),
    Section(
        "unshaped",
        "hosts whose NICs are not shaped: all of them share the cores of this machine",
        (
            "torch.distributed.all_reduce, float32, private memory, a rank on each host; one call",
            "ring: 2M(n-1)/n bytes at the slowest stream's rate while all hosts send in a ring,",
            "over raw TCP sockets, which neither fold nor check",
            "iperf3: M bytes each way at half of what `iperf3 --bidir` moves between two hosts",
        ),
        (_GLOO, _SHOAL, _RING, _IPERF),
        _UNSHAPED,
        show_time,
        in_quick=lambda case: case.n_bytes == 25 * MIB,
    ),
    Section(
        "channels",
        "two hosts whose NICs are not shaped: a second channel",
        (
            "torch.distributed.all_reduce, SHOAL_CHANNELS=1 and 2; docs/planner.md explains which",
            "of them the planner chooses on a machine like this one",
        ),
        columns(time_of, "one channel", "two channels"),
        tuple(
            replace(
                _TWO_UNSHAPED,
                n_bytes=n_bytes,
                goals=(Faster("two channels", than="one channel", times=1),),
            )
            for n_bytes in (25 * MIB, 256 * MIB)
        ),
        show_time,
    ),
    Section(
        "flight",
        "four hosts whose NICs are not shaped, 8 buckets of 25 MiB in flight",
        ("torch.distributed.all_reduce(async_op=True) of each, then wait for all; slowest rank",),
        (_GLOO, _SHOAL),
        (
            replace(
                _unshaped(4, 8 * 25 * MIB),
                collective="buckets",
                goals=(Faster("shoal", than="gloo", times=1.3),),
            ),
        ),
        show_time,
    ),
    Section(
        "unshaped-cpu",
        "CPU seconds (user and system, all ranks) per gigabyte of tensor, unshaped hosts",
        ("10 calls in a row after a barrier; waiting that spins counts as work",),
        columns(cpu_of, "gloo", "shoal"),
        tuple(
            replace(_TWO_UNSHAPED, n_bytes=n_bytes, n_calls=10, n_samples=2)
            for n_bytes in (25 * MIB, 256 * MIB)
        ),
        show_cpu,
        in_quick=lambda case: case.n_bytes == 25 * MIB,
    ),
    Section(
        "unshaped-memory",
        "peak resident memory of a rank (VmHWM), less its tensors and `import torch`",
        ("new processes on unshaped hosts, all-reduce of 64 MiB, then 256 MiB; the largest rank",),
        columns(peak_of, "gloo", "shoal"),
        (
            replace(_TWO_UNSHAPED, n_bytes=256 * MIB, goals=()),
            replace(_unshaped(4, 256 * MIB), goals=()),
        ),
        show_memory,
        in_rounds=False,
    ),
    Section(
        "mixed",
        "hosts at 1 Gbit/s: a 4 B all-reduce while two buckets of 100 MiB are in flight",
        (
            "alone: one small call after another; mixed: the same between the start of two large",
            "asynchronous all-reduces and the end of the first that ends; slowest rank of each",
            "call, median, and the 99th percentile of the same calls",
        ),
        (*_latencies("gloo"), *_latencies("shoal")),
        tuple(
            Case(
                n_hosts,
                4,
                (
                    Within("shoal mixed", of="shoal alone", times=3),
                    Within("shoal mixed p99", of="shoal alone p99", times=3),
                    Faster("shoal mixed", than="gloo mixed", times=1),
                ),
                n_hosts=n_hosts,
            )
            for n_hosts in (2, 4)
        ),
        show_time,
    ),
    Section(
        "paths",
        "two hosts, two NICs each: 400 and 130 Mbit/s",
        (
            "gloo: by the faster NIC; shoal: by both, as two paths of a link",
            "NICs: M bytes at the sum of what raw TCP streams reach on both at once",
        ),
        (_GLOO, _SHOAL, Benchmark("NICs", nics_time)),
        (
            Case(
                2,
                25 * MIB,
                (Within("shoal", of="NICs", times=1 / 0.95), Faster("shoal", "gloo", 1)),
                n_samples=3,
                n_hosts=2,
                rate_mbit=400,
                more_mbit=(130,),
            ),
        ),
        show_time,
    ),
    Section(
        "strangers",
        "two hosts, 1 Gbit/s: processes without the key connect to rank 0 while 25 MiB are reduced",
        (
            "1,000 silent connections are held open, and 20,000 more in each round send 128 bytes",
            "of garbage; rank 0 may have 64 descriptors",
        ),
        (_SHOAL, Benchmark("among strangers", among_strangers("shoal", 1000, 20_000))),
        (
            Case(
                2,
                25 * MIB,
                (Within("among strangers", of="shoal", times=1.05),),
                n_hosts=2,
                rate_mbit=1000,
            ),
        ),
        show_time,
    ),
    Section(
        "cuts",
        "two hosts: a NIC is cut in the middle of every tenth all-reduce of 25 MiB",
        (
            "its interface is set down and up again: silence in both directions, no reset",
            "first row: one of two NICs (400 and 130 Mbit/s), for 1 s; second: the only one, 2 s",
            "shoal: the mean time of calls with a cut beyond the median of the other calls;",
            "a call that fails or a wrong sum is reported below the table",
        ),
        (Benchmark("shoal", added_by_cut("shoal")),),
        (
            Case(2, 25 * MIB, (Below("shoal", 0.2),), 30, 1, 2, 400, more_mbit=(130,)),
            Case(2, 25 * MIB, (Below("shoal", 4.0),), 20, 1, 2, 400),
        ),
        show_time,
        in_rounds=False,
    ),
)
