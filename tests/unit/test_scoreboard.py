"""The arithmetic of the project's tables, without measuring or training anything."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from bench.scoreboard.benchmark import Benchmark, Result, Section, run_section
from bench.scoreboard.case import Case
from bench.scoreboard.choices import choice_verdicts
from bench.scoreboard.goals import AtLeast, Below, Faster, Near, Within
from bench.scoreboard.grid import is_close
from bench.scoreboard.measures import added_by_cut, latencies
from bench.scoreboard.pools import BenchOptions, WorkerPools
from bench.scoreboard.served_faults import pauses
from bench.scoreboard.served_measures import served_calls, served_time
from bench.scoreboard.training_measures import Trained, hidden_part
from shoal.bench.job import Failure


@pytest.fixture
def pools() -> WorkerPools:
    return WorkerPools(BenchOptions(n_rounds=3, openmpi=Path("nowhere")))


def rows_of(pools: WorkerPools, *benchmarks: Benchmark, **more: Any) -> list[Result]:
    cases = (Case(2, 1024), Case(4, 25 * 1024 * 1024))
    toy = Section("toy", "a toy", ("made up",), benchmarks, cases, "{:g} s".format, **more)
    return run_section(toy, pools, lambda _text: None)


def test_benchmarks_take_turns_and_a_number_is_their_median(pools: WorkerPools) -> None:
    turns: list[str] = []

    def logging(label: str) -> Benchmark:
        def measure(_pools: WorkerPools, case: Case) -> float:
            turns.append(f"{label}{case.n_ranks}")
            return [1.0, 100.0, 2.0][len(turns) // 2 % 3]

        return Benchmark(label, measure)

    absent = replace(logging("c"), enters=lambda _case: False)
    rows = rows_of(
        pools, logging("a"), logging("b"), absent, note=lambda _pools, case: f"{case.n_ranks} ranks"
    )
    assert turns == ["a2", "b2"] * 3 + ["a4", "b4"] * 3
    assert [row.medians()["b"] for row in rows] == [2.0, 2.0]
    assert [row.note for row in rows] == ["2 ranks", "4 ranks"]
    values = iter([1.0, 2.0])
    drifting = Benchmark("a", lambda _pools, _case: next(values))
    assert rows_of(pools, drifting, in_rounds=False)[1].values == {"a": [2.0]}


def test_a_benchmark_that_failed_has_no_number_and_no_turn(pools: WorkerPools) -> None:
    turns = 0

    def measure(_pools: WorkerPools, _case: Case) -> float:
        nonlocal turns
        turns += 1
        if turns == 2:
            raise Failure("rank 1 died")
        return 1.0

    rows = rows_of(pools, Benchmark("a", measure))
    assert turns == 2 + 3  # of three benchmarks in the first case, and of all in the second
    assert [row.medians() for row in rows] == [{}, {"a": 1.0}]
    assert rows[0].failures == {"a": "rank 1 died"}


def test_a_goal_is_met_missed_or_not_measured() -> None:
    for goal, met, missed in (
        (Faster("we", "they", 4), {"we": 2.0, "they": 8.0}, {"we": 1.0, "they": 3.999}),
        (Within("we", "they", 1.5), {"we": 3.0, "they": 2.0}, {"we": 3.2, "they": 2.0}),
        (Near("we", "they", 1.25), {"we": 1.0, "they": 1.25}, {"we": 2.3, "they": 3.0}),
        (Below("we", 20.0), {"we": 20.0}, {"we": 21.0}),
        (AtLeast("we", 0.9), {"we": 0.9}, {"we": 0.85}),
    ):
        for medians, end in ((met, "met"), (missed, "MISSED"), ({}, "not measured")):
            assert str(goal.judge(medians, "{:g} s".format)).endswith(f" {end}")


HERE, LAB = Case(2, 1024), Case(4, 1024, n_hosts=4)


def test_a_ratio_is_the_median_over_rounds_and_uncertain_where_they_disagree() -> None:
    # The machine was ten times slower in the second round; medians of times would give 11 to 10.
    row = Result(HERE, {"gloo": [20.0, 110.0, 11.0], "shoal": [10.0, 100.0, 1.0]})
    assert row.ratios("gloo", "shoal") == [2.0, 1.1, 11.0]
    uncertain = [[0.5, 2.0, 0.9], [0.5, 2.0, 1.1]]
    for ratios in ([4.0, 4.0], [0.5, 0.5], *uncertain):
        row = Result(LAB, {"gloo": ratios, "shoal": [1.0] * len(ratios)})
        assert is_close(row) == (ratios in uncertain)


def test_a_choice_is_compared_with_the_best_other_algorithm() -> None:
    rows = [
        Result(HERE, {"planner": [2.0, 2.0], "ring": [1.0, 1.0], "tree": [1.9, 1.9]}, note="ring"),
        Result(LAB, {"planner": [2.0, 2.0], "ring": [2.0, 2.0], "tree": [1.0, 1.0]}, note="ring"),
    ]
    (verdict,) = choice_verdicts(rows)
    assert "at 50.0% of 2 points" in str(verdict)


def test_a_latency_is_of_each_calls_slowest_rank_and_a_cut_adds_to_the_median() -> None:
    answers = [
        {"times_s": [1.0, 1.0, 1.0, 9.0], "cut_s": [3.0, 5.0], "median_s": 1.0},
        {"times_s": [2.0, 3.0, 4.0, 1.0], "cut_s": [3.0, 5.0], "median_s": 1.0},
    ]
    pools: Any = SimpleNamespace(ask=lambda *_what, **_arguments: answers)
    (median, percentile_99), case = latencies("shoal", 2), Case(2, 4)
    with pytest.raises(Failure, match="shoal was not measured"):
        percentile_99(pools, case)
    assert median(pools, case) == 3.5
    assert percentile_99(pools, case) == 9.0
    assert added_by_cut("shoal")(pools, case) == 3.0


MIB = 1 << 20
CASE = Case(8, 25 * MIB, n_hosts=8, rate_mbit=400, n_servers=4)


class FakePools:
    """Calls with some bytes through servers; ranks that answer a command with `answers`. Keeps the
    commands."""

    def __init__(self, *answers: Mapping[str, Any], taken: int = 0) -> None:
        self.taken, self.received = taken, 0
        self.settings = SimpleNamespace(n_rounds=1)
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self._answers = answers

    def servers(self, _case: Case) -> Any:
        return SimpleNamespace(all_received_bytes=lambda: self.received)

    def sample(self, _library: str, _case: Case) -> Any:
        self.received += self.taken
        return SimpleNamespace(time_s=2.0)

    def ask(self, library: str, _case: Case, task: str, **what: Any) -> Any:
        self.asked.append((library, task, what))
        return self._answers


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
    fail = Mock(side_effect=OSError("no such process"))
    with pytest.raises(Failure, match="failed: OSError: no such process"):
        pauses(fail, 0.0, FakePools(one), CASE)


TRAINING = Case(4, 0, n_samples=3, n_hosts=4, rate_mbit=400, model="bert")


def rank(*times_s: float) -> dict[str, Any]:
    return {"times_s": times_s, "losses": (1.0,) * len(times_s), "window_s": 0.0}


def test_a_step_is_the_mean_of_the_slowest_rank() -> None:
    pools = FakePools(rank(0.1, 0.5, 0.2), rank(0.3, 0.1, 0.1))
    step_s = Trained(wrapper="torch", over="gloo").step(pools, TRAINING)
    assert step_s == pytest.approx((0.1 + 0.5 + 0.2) / 3)
    what = {"n_steps": 3, "n_warmup": 1, "model": "bert", "wrapper": "torch", "over": "gloo"}
    assert pools.asked == [("shoal", "train", what)]
    served = replace(TRAINING, n_servers=4)  # by ranks that know the servers, in every column
    Trained(wrapper="torch", over="gloo").step(pools, served)
    assert pools.asked[1][0] == "served torch"


def test_the_hidden_part_fits_the_window() -> None:
    many = 1 << 40
    parts = {(0.0, 2.0, many): 1.0, (0.1, 2.0, many): 0.9, (1.0, 2.0, many): 0.0}
    # No more than the window can be hidden.
    parts |= {(0.5, 0.5, many): 1.0, (0.75, 0.5, many): 0.5}
    parts[1.5, 0.5, many] = 0.0  # averaging took longer beside computing than alone
    parts |= {(1 / 4, 2.0, 4): 1.0, (0.4, 2.0, 4): 0.8}  # only the last layer's share is left
    parts[0.4, 0.75, 4] = 0.8  # the window is as long as the rest
    for (exposed_s, window_s, n_layers), part in parts.items():
        assert hidden_part(1.0, exposed_s, window_s, n_layers) == pytest.approx(part)
        with pytest.raises(Failure, match="nothing could be hidden"):
            hidden_part(1.0, exposed_s, 0.0, n_layers)
