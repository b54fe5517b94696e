"""The tables of servers: what they are held against, and which rows are taken; nothing measured."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bench.scoreboard import served_measures
from bench.scoreboard.__main__ import main
from bench.scoreboard.benchmark import Benchmark, Section, run_section
from bench.scoreboard.case import Case
from bench.scoreboard.job import is_same_place, spec_of
from bench.scoreboard.lab_servers import LabServers
from bench.scoreboard.sections import SECTIONS
from bench.scoreboard.served import SERVED_SECTIONS
from bench.scoreboard.served_faults import Pauses
from bench.scoreboard.served_measures import ServedCalls, incast_line, optimum
from bench.scoreboard.steps import steady_steps
from bench.scoreboard.suite import chosen_of
from bench.scoreboard.table import label_of, show_time
from shoal.bench.failure import Failure
from shoal.bench.launch import Placement
from shoal.bench.libraries import LibraryRank
from shoal.bench.values import FilledBuffer

if TYPE_CHECKING:
    from shoal.bench.collectives import Call

MIB = 1 << 20
CASE = Case(8, 25 * MIB, n_hosts=8, rate_mbit=400, n_servers=4)


class FakePools:
    """Streams that carry 100 MB/s by each NIC, and calls of which servers take some bytes."""

    def __init__(self, taken: int = 0, steps: Sequence[Mapping[str, Any]] = ()) -> None:
        self.taken, self.n_cleared, self.received = taken, 0, 0
        self.settings = SimpleNamespace(n_rounds=1)
        self._steps = steps

    def cluster(self, _case: Case) -> None: ...

    def servers(self, _case: Case) -> Any:
        return SimpleNamespace(all_received_bytes=lambda: self.received)

    def sample(self, _library: str, _case: Case) -> Any:
        self.received += self.taken
        return SimpleNamespace(time_s=2.0)

    def ask(self, _library: str, _case: Case, _task: str, **_what: Any) -> Any:
        return self._steps

    def clear(self) -> None:
        self.n_cleared += 1

    def forget(self) -> None: ...


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        served_measures, "measure_streams", lambda _cluster, flows, _n: [100e6] * len(flows)
    )


@pytest.mark.parametrize(
    ("case", "seconds_of_the_tensor"),
    [
        (replace(CASE, n_servers=8), 1.0),
        (CASE, 2 * 8 * 7 / (64 + 4 * 8 - 2 * 4)),  # Jiang et al., OSDI 2020
        (replace(CASE, n_servers=12), 1.0),
        # Half of the servers carry half: 3 servers' worth.
        (replace(CASE, server_mbit=(400, 200)), 2 * 8 * 7 / (64 + 3 * 8 - 2 * 3)),
        (replace(CASE, n_servers=8, more_mbit=(400 / 3,)), 0.5),  # the fake's NICs are alike
    ],
)
def test_the_optimum_is_the_linear_programs_at_the_rate_of_a_raw_stream(
    case: Case, seconds_of_the_tensor: float
) -> None:
    at_a_stream = 25 * MIB / 100e6
    assert optimum(FakePools(), case) == pytest.approx(seconds_of_the_tensor * at_a_stream)


def test_into_one_server_go_the_tensors_of_all_workers() -> None:
    case = Case(16, 4 * MIB, n_hosts=16, rate_mbit=200, n_servers=1)
    assert incast_line(FakePools(), case) == pytest.approx(16 * 4 * MIB / 100e6)


def test_calls_that_the_workers_make_alone_are_told_from_those_of_servers() -> None:
    calls = ServedCalls("served")
    for taken, is_used in ((0, 0.0), (MIB // 10, 0.0), (5 * MIB, 1.0)):
        pools = FakePools(taken)
        assert calls.time(pools, CASE) == 2.0
        assert calls.is_used(pools, CASE) == is_used
    with pytest.raises(Failure, match="the workers do such calls alone"):
        ServedCalls("served bf16", must_be=True).time(FakePools(0), CASE)


def test_rows_with_other_hosts_get_processes_of_their_own_and_leave_none() -> None:
    cases = (CASE, replace(CASE, n_bytes=MIB), replace(CASE, n_servers=8))
    assert [is_same_place(CASE, case) for case in cases] == [True, True, False]
    one = Benchmark("one", lambda _pools, _case: 1.0)
    section = Section("s", "", (), (one,), cases, show_time, is_large=True)
    pools = FakePools()
    run_section(section, pools, lambda _text: None)
    assert pools.n_cleared == 3  # before the first, before the last, and at the end


def test_one_name_asks_for_all_tables_of_servers_and_a_row_by_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert {one.part_of for one in SERVED_SECTIONS} == {"servers"}
    assert set(SERVED_SECTIONS) <= set(SECTIONS)
    assert main(["--only", "servers", "--case", "9+9"]) == 2
    told = capsys.readouterr().err
    assert "no row is left by these options; the tables' rows are " in told
    assert "8+8, 25 MiB, 400 Mbit/s" in told
    asked = argparse.Namespace(
        quick=True, case=["16+16, 25"], only=["servers"], ranks=None, hosts=None, collective=None
    )
    asked.without = []
    rows = [label_of(case) for section in chosen_of(asked) for case in section.cases]
    assert rows == ["16+16, 25 MiB, 200 Mbit/s"]


def rank_with(call: Call, arrays: list[Any]) -> LibraryRank:
    """One rank, which hands out arrays in the order of allocations."""

    def allocate(n_elems: int, _dtype: str) -> FilledBuffer:
        arrays.append(np.zeros(n_elems, np.float32))
        return FilledBuffer(arrays[-1], arrays[-1])

    def bind(what: Any, _data: Any, _other: Any) -> Call:
        return call if what.n_bytes > 4 else lambda: None

    return LibraryRank(0, allocate, lambda: None, bind, lambda: None, range(1))


def test_every_step_is_looked_at() -> None:
    arrays: list[Any] = []
    assert steady_steps(rank_with(lambda: None, arrays), 4 * 1000, 0.0).n_wrong == 0

    def spoil() -> None:
        arrays[-2][999] += 1

    spoiled = steady_steps(rank_with(spoil, arrays), 4 * 1000, 0.0)
    assert (spoiled.n_wrong, len(spoiled.times_s)) == (1, 1)


def pause_of(*steps: Mapping[str, Any], n_done: int = 1) -> float:
    return Pauses(lambda _servers, _over: n_done, 0.0).longest(FakePools(steps=steps), CASE)


def test_a_pause_is_what_the_slowest_step_takes_beyond_the_median_one() -> None:
    one = {"times_s": [0.1, 0.1, 0.5, 0.1], "n_wrong": 0}
    other = {"times_s": [0.2, 0.2, 0.2, 0.9], "n_wrong": 0}
    assert pause_of(one, other) == pytest.approx(0.9 - 0.35)
    with pytest.raises(Failure, match="WRONG RESULT of 2 of 4 steps"):
        pause_of(one, other | {"n_wrong": 2})
    with pytest.raises(Failure, match="over before anything was done"):
        pause_of(one, other, n_done=0)

    def fail(_servers: LabServers, _over: object) -> int:
        raise OSError("no such process")

    with pytest.raises(Failure, match="to servers failed: OSError: no such process"):
        Pauses(fail, 0.0).longest(FakePools(steps=[one]), CASE)


def test_servers_that_differ_are_on_hosts_that_do() -> None:
    spec = spec_of("gloo", replace(CASE, server_mbit=(400.0, 200.0)))
    assert spec.lab().rates[7:] == ((400,), (400,), (200,), (400,), (200,))
    assert spec_of("gloo", CASE).place == spec_of("served", CASE).place
    told = LabServers(spec, spec.lab(), Path("nowhere")).environment
    assert told["SHOAL_SERVERS"] == "10.77.0.9,10.77.0.10,10.77.0.11,10.77.0.12"
    assert told["SHOAL_SERVERS_REQUIRED"] == "4"
    assert Placement(environ=told).environ == told
