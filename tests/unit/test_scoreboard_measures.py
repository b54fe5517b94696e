"""Columns of the tables of servers and of trainings, without measuring or training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from bench.scoreboard import served_measures
from bench.scoreboard.case import Case
from bench.scoreboard.served_faults import pauses
from bench.scoreboard.served_measures import incast_line, optimum, served_calls, served_time
from bench.scoreboard.training_measures import (
    Trained,
    hidden_part,
)
from shoal.bench.job import Failure

if TYPE_CHECKING:
    from bench.scoreboard.lab_servers import LabServers

MIB = 1 << 20
CASE = Case(8, 25 * MIB, n_hosts=8, rate_mbit=400, n_servers=4)


class FakePools:
    """Streams of 100 MB/s per NIC; calls with some bytes through servers; ranks that answer a
    command with `answers`. Keeps the commands."""

    def __init__(self, *answers: Mapping[str, Any], taken: int = 0) -> None:
        self.taken, self.received = taken, 0
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


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        served_measures, "measure_streams", lambda _cluster, flows, _n: [100e6] * len(flows)
    )


@pytest.mark.parametrize(
    ("case", "seconds_of_the_tensor"),
    [
        (CASE, 2 * 8 * 7 / (64 + 4 * 8 - 2 * 4)),  # Jiang et al., OSDI 2020
        # Half of the servers have half the rate: worth 3 servers.
        (replace(CASE, server_mbit=(400, 200)), 2 * 8 * 7 / (64 + 3 * 8 - 2 * 3)),
        (replace(CASE, n_servers=8, more_mbit=(400 / 3,)), 0.5),  # the fake's NICs are equal
    ],
)
def test_the_optimum_solves_the_linear_program(case: Case, seconds_of_the_tensor: float) -> None:
    at_a_stream = 25 * MIB / 100e6
    assert optimum(FakePools(), case) == pytest.approx(seconds_of_the_tensor * at_a_stream)


def test_one_server_receives_the_tensors_of_all_workers() -> None:
    case = Case(16, 4 * MIB, n_hosts=16, rate_mbit=200, n_servers=1)
    assert incast_line(FakePools(), case) == pytest.approx(16 * 4 * MIB / 100e6)


def test_calls_of_workers_alone_differ_from_calls_with_servers() -> None:
    for taken, is_used in ((0, 0.0), (MIB // 10, 0.0), (5 * MIB, 1.0)):
        assert served_calls("served", FakePools(taken=taken), CASE) == (2.0, is_used)
    with pytest.raises(Failure, match="the workers do such calls alone"):
        served_time("served bf16")(FakePools(), CASE)


def pause_of(*steps: Mapping[str, Any], n_done: int = 1) -> float:
    return pauses(lambda _servers, _over: n_done, 0.0, FakePools(*steps), CASE).longest_s


def test_a_pause_is_the_slowest_steps_time_beyond_the_median() -> None:
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
        pauses(fail, 0.0, FakePools(one), CASE)


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
    served = replace(TRAINING, n_servers=4)  # by ranks that know the servers, in every column
    Trained(wrapper="torch", over="gloo").step(pools, served)
    assert pools.asked[1][0] == "served torch"


@pytest.mark.parametrize(
    ("exposed_s", "window_s", "n_layers", "part"),
    [
        (0.0, 2.0, 1 << 40, 1.0),
        (0.1, 2.0, 1 << 40, 0.9),
        (1.0, 2.0, 1 << 40, 0.0),
        (0.5, 0.5, 1 << 40, 1.0),  # no more than the window can be hidden
        (0.75, 0.5, 1 << 40, 0.5),
        (1.5, 0.5, 1 << 40, 0.0),  # averaging took longer beside computing than alone
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
