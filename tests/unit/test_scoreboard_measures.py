"""Columns of the tables of servers and of trainings; nothing is measured, and nothing trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from bench.scoreboard import served_measures
from bench.scoreboard.benchmark import Benchmark, Section, run_section
from bench.scoreboard.case import Case
from bench.scoreboard.job import is_same_place
from bench.scoreboard.served_faults import Pauses
from bench.scoreboard.served_measures import ServedCalls, incast_line, optimum
from bench.scoreboard.steps import steady_steps
from bench.scoreboard.suite import run_suite
from bench.scoreboard.table import show_time
from bench.scoreboard.training import TRAINING_SECTIONS
from bench.scoreboard.training_measures import (
    Asked,
    Kept,
    Trained,
    end_difference,
    exposed,
    hidden_part,
    loss_difference,
    made_of,
)
from shoal.bench.job import Failure
from shoal.bench.libraries import LibraryRank
from shoal.bench.values import FilledBuffer
from shoal.limits import STAGING_BYTES

if TYPE_CHECKING:
    from bench.scoreboard.lab_servers import LabServers
    from shoal.bench.collectives import Call

MIB = 1 << 20
CASE = Case(8, 25 * MIB, n_hosts=8, rate_mbit=400, n_servers=4)


class FakePools:
    """Streams that carry 100 MB/s by each NIC; calls of which servers take some bytes; ranks that
    answer a command with `answers`. Keeps the commands."""

    def __init__(self, *answers: Mapping[str, Any], taken: int = 0) -> None:
        self.taken, self.n_cleared, self.received = taken, 0, 0
        self.settings = SimpleNamespace(n_rounds=1)
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self._answers = answers

    def cluster(self, _case: Case) -> None: ...

    def servers(self, _case: Case) -> Any:
        return SimpleNamespace(all_received_bytes=lambda: self.received)

    def sample(self, _library: str, _case: Case) -> Any:
        self.received += self.taken
        return SimpleNamespace(time_s=2.0)

    def ask(self, library: str, _case: Case, task: str, **what: Any) -> Any:
        self.asked.append((library, task, what))
        return self._answers

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
def test_the_optimum_is_the_linear_programs(case: Case, seconds_of_the_tensor: float) -> None:
    at_a_stream = 25 * MIB / 100e6
    assert optimum(FakePools(), case) == pytest.approx(seconds_of_the_tensor * at_a_stream)


def test_into_one_server_go_the_tensors_of_all_workers() -> None:
    case = Case(16, 4 * MIB, n_hosts=16, rate_mbit=200, n_servers=1)
    assert incast_line(FakePools(), case) == pytest.approx(16 * 4 * MIB / 100e6)


def test_calls_that_the_workers_make_alone_are_told_from_those_of_servers() -> None:
    calls = ServedCalls("served")
    for taken, is_used in ((0, 0.0), (MIB // 10, 0.0), (5 * MIB, 1.0)):
        pools = FakePools(taken=taken)
        assert calls.time(pools, CASE) == 2.0
        assert calls.is_used(pools, CASE) == is_used
    with pytest.raises(Failure, match="the workers do such calls alone"):
        ServedCalls("served bf16", must_be=True).time(FakePools(), CASE)


def test_rows_with_other_hosts_get_processes_of_their_own_and_leave_none() -> None:
    cases = (CASE, replace(CASE, n_bytes=MIB), replace(CASE, n_servers=8))
    assert [is_same_place(CASE, case) for case in cases] == [True, True, False]
    one = Benchmark("one", lambda _pools, _case: 1.0)
    section = Section("s", "", (), (one,), cases, show_time, is_large=True)
    pools = FakePools()
    run_section(section, pools, lambda _text: None)
    assert pools.n_cleared == 3  # before the first, before the last, and at the end


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
    return Pauses(lambda _servers, _over: n_done, 0.0).longest(FakePools(*steps), CASE)


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
        Pauses(fail, 0.0).longest(FakePools(one), CASE)


# Trainings.

TRAINING = Case(4, 0, n_samples=3, n_hosts=4, rate_mbit=400, model="bert")


def rank(*times_s: float, losses: tuple[float, ...] = (), window_s: float = 0.0) -> dict[str, Any]:
    return {"times_s": times_s, "losses": losses or (1.0,) * len(times_s), "window_s": window_s}


def test_a_step_is_the_mean_of_the_slowest_rank() -> None:
    pools = FakePools(rank(0.1, 0.5, 0.2), rank(0.3, 0.1, 0.1))
    step_s = Trained(wrapper="torch", over="gloo").step(pools, TRAINING)
    assert step_s == pytest.approx((0.1 + 0.5 + 0.2) / 3)
    what = {"n_steps": 3, "n_warmup": 1, "model": "bert", "wrapper": "torch", "over": "gloo"}
    assert pools.asked == [("shoal", "train", what)]
    served = replace(TRAINING, n_servers=4)  # by ranks that know the servers, whatever the column
    Trained(wrapper="torch", over="gloo").step(pools, served)
    assert pools.asked[1][0] == "served torch"


def test_the_first_step_of_a_training_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from bench.scoreboard.training_steps import Training, Variant, dist

    class Numbered(Training):
        """Its steps take as many seconds as their number."""

        def __init__(self) -> None:
            self._variant, self._n_taken = Variant("paced", wrapper="torch"), 0

        def step(self) -> tuple[float, float, float, float]:
            self._n_taken += 1
            return float(self._n_taken), 0.0, 0.0, 0.0

    monkeypatch.setattr(dist, "barrier", lambda: None)
    training = Numbered()
    assert training.take(2, n_warmup=1).times_s == [3.0, 4.0]
    assert training.take(2, n_warmup=1).times_s == [6.0, 7.0]


@pytest.mark.parametrize(
    ("exposed_s", "window_s", "n_layers", "part"),
    [
        (0.0, 2.0, 1 << 40, 1.0),
        (0.1, 2.0, 1 << 40, 0.9),
        (1.0, 2.0, 1 << 40, 0.0),
        (0.5, 0.5, 1 << 40, 1.0),  # no more than the window can be hidden
        (0.75, 0.5, 1 << 40, 0.5),
        (1.5, 0.5, 1 << 40, 0.0),  # averaging beside computing took longer than alone
        (1 / 4, 2.0, 4, 1.0),  # only the last layer's share is left
        (0.4, 2.0, 4, 0.8),
        (0.4, 0.75, 4, 0.8),  # the window is as long as the rest
    ],
)
def test_the_hidden_part_fits_the_window(
    exposed_s: float, window_s: float, n_layers: int, part: float
) -> None:
    assert hidden_part(1.0, exposed_s, window_s, n_layers) == pytest.approx(part)
    with pytest.raises(Failure, match="nothing could be hidden"):
        hidden_part(1.0, exposed_s, 0.0, n_layers)


def test_losses_are_compared_step_by_step_or_at_the_end() -> None:
    one, other = SimpleNamespace(losses=[9.0, 2.0, 2.2]), SimpleNamespace(losses=[9.0, 2.0, 2.0])
    assert end_difference(one, other, 2)(FakePools(), TRAINING) == pytest.approx(0.05)
    assert loss_difference(one, other)(FakePools(), TRAINING) == pytest.approx(0.1)
    other.losses = []
    for measure in (end_difference(one, other, 2), loss_difference(one, other)):
        with pytest.raises(Failure, match="not trained"):
            measure(FakePools(), TRAINING)


def test_one_command_fills_several_columns_with_the_most_that_a_rank_has() -> None:
    asked = Asked("order_costs", lambda case: {"n": case.n_ranks})
    with pytest.raises(Failure, match="had no answer"):
        asked.then("agree_s")(FakePools(), TRAINING)
    pools = FakePools(
        {"times_s": [1.0, 1.0, 3.0], "agree_s": 0.1}, {"times_s": [1.0, 2.0, 1.0], "agree_s": 0.3}
    )
    assert asked.first("times_s")(pools, TRAINING) == 2.0
    assert asked.then("agree_s")(pools, TRAINING) == 0.3
    assert asked.slowest(pools, TRAINING) == 1.5
    assert pools.asked == [("shoal", "order_costs", {"n": 4})]
    # A column made of others has no number where one of them has none.
    step, alone = Kept(Trained().step), Kept(Trained().step)
    column = made_of(exposed, step, alone)
    step(FakePools(rank(0.5)), TRAINING)
    with pytest.raises(Failure, match="a column that it is made of has no number"):
        column(FakePools(), TRAINING)
    alone(FakePools(rank(0.2)), TRAINING)
    assert column(FakePools(), TRAINING) == pytest.approx(0.3)


def test_a_broken_table_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def table(name: str, measure: Any) -> Section:
        return Section(name, "", (), (Benchmark("a", measure),), (Case(2, 4),), show_time)

    sections = (table("one", lambda *_: 1 / 0), table("two", lambda *_: 0.5))
    monkeypatch.setattr("bench.scoreboard.suite.SECTIONS", sections)
    names = ("only", "rounds", "collective", "case", "ranks", "hosts", "log", "json")
    args: Any = SimpleNamespace(**dict.fromkeys(names), quick=True, without=[])
    args.openmpi = args.mpich = Path("none")
    drawn: list[str] = []
    assert run_suite(args, [], lambda section, _text, _rows: drawn.append(section.name)) == 1
    told = capsys.readouterr().out
    assert "# no one: ZeroDivisionError" in told
    assert "500 ms" in told
    assert drawn == ["two"]


def test_pictures_are_drawn_of_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench.scoreboard.pictures import draw_table

    for section in TRAINING_SECTIONS:
        measured = {one.label: [0.3, 0.2, 0.4] for one in section.benchmarks}
        rows = [
            {"row": "", "model": case.model, "n_ranks": 4, "n_servers": 0, "rounds": rounds}
            for case, rounds in zip(section.cases, (measured, *[{}] * 9), strict=False)
        ]
        draw_table(tmp_path, section, section.name, rows)
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    no_picture = {"training-copies", "training-losses", "training-memory", "training-order"}
    assert drawn == {section.name for section in TRAINING_SECTIONS} - no_picture


PARAMETERS = {"resnet": 2.8e6, "bert": 5.3e6, "linear": 10.6e6, "paced": 4.2e6, "wide": 58.7e6}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_is_as_large_as_the_page_says_and_has_gradients(name: str) -> None:
    torch = pytest.importorskip("torch")
    from bench.scoreboard.training_models import MODELS

    made = MODELS[name]()
    parameters = list(made.module.parameters())
    assert sum(p.numel() for p in parameters) == pytest.approx(PARAMETERS[name], rel=0.02)
    if name == "wide":  # a copy of its gradients would show; in one host buffers are of 4 MiB
        n_bytes = sum(p.numel() * p.element_size() for p in parameters)
        assert n_bytes >= 4 * (STAGING_BYTES + (4 << 20))
        return
    made.loss(made.module, made.batch(torch.Generator().manual_seed(1))).backward()
    assert all(p.grad is not None for p in parameters)
