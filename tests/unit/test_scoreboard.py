"""The arithmetic of the project's tables, without measuring anything."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.scoreboard.benchmark import Benchmark, Result, Section, run_section
from bench.scoreboard.case import Case
from bench.scoreboard.choices import (
    choice_lines,
    choice_verdicts,
)
from bench.scoreboard.goals import AtLeast, Below, Faster, Near, Within
from bench.scoreboard.grid import grid_lines, is_close
from bench.scoreboard.measures import added_by_cut, latencies
from bench.scoreboard.pools import BenchOptions, WorkerPools
from shoal.bench.job import Failure


@pytest.fixture
def pools() -> WorkerPools:
    return WorkerPools(BenchOptions(n_rounds=3, openmpi=Path("nowhere")))


def section_of(*benchmarks: Benchmark, **more: Any) -> Section:
    cases = (Case(2, 1024), Case(4, 25 * 1024 * 1024))
    return Section("toy", "a toy", ("made up",), benchmarks, cases, "{:g} s".format, **more)


def rows_of(pools: WorkerPools, *benchmarks: Benchmark, **more: Any) -> list[Result]:
    return run_section(section_of(*benchmarks, **more), pools, lambda _text: None)


def drifting(label: str, values: list[float]) -> Benchmark:
    """Return a benchmark that repeats these values in turn."""
    turns = itertools.cycle(values)
    return Benchmark(label, lambda _pools, _case: next(turns))


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
    assert rows_of(pools, drifting("a", [1.0, 2.0]), in_rounds=False)[1].values == {"a": [2.0]}


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


@pytest.mark.parametrize(
    ("goal", "medians", "text"),
    [
        (Faster("we", "they", 4), {"we": 2.0, "they": 8.0}, "they/we 4.00 >= 4 met"),
        (Faster("we", "they", 4), {"we": 1.0, "they": 3.999}, "they/we 4.00 >= 4 MISSED"),
        (Faster("we", "they", 1.3), {"we": 2.0}, "they/we ? >= 1.3 not measured"),
        (Within("we", "floor", 1.5), {"we": 3.0, "floor": 2.0}, "we/floor 1.50 <= 1.5 met"),
        (Within("we", "floor", 1.5), {"we": 3.2, "floor": 2.0}, "we/floor 1.60 <= 1.5 MISSED"),
        (Near("we", "plan", 1.25), {"we": 1.0, "plan": 1.25}, "we/plan 0.80 from 0.80 to 1.25 met"),
        (
            Near("we", "plan", 1.25),
            {"we": 2.3, "plan": 3.0},
            "we/plan 0.77 from 0.80 to 1.25 MISSED",
        ),
        (Below("we", 20.0), {"we": 20.0}, "we 20 s <= 20 s met"),
        (Below("we", 20.0), {"we": 21.0}, "we 21 s <= 20 s MISSED"),
        (AtLeast("we", 0.9), {"we": 0.9}, "we 0.9 s >= 0.9 s met"),
        (AtLeast("we", 0.9), {"we": 0.85}, "we 0.85 s >= 0.9 s MISSED"),
    ],
)
def test_a_goal_is_met_missed_or_not_measured(
    goal: Faster | Within | Near | Below | AtLeast, medians: dict[str, float], text: str
) -> None:
    assert str(goal.judge(medians, "{:g} s".format)) == text


def row_of(collective: str, case: Case, gloo: list[float], shoal: list[float]) -> Result:
    return Result(replace(case, collective=collective), {"gloo": gloo, "shoal": shoal})


HERE, LAB = Case(2, 1024), Case(4, 1024, n_hosts=4)


def test_a_ratio_is_the_median_over_rounds_and_uncertain_where_they_disagree() -> None:
    # The machine was ten times slower in the second round; medians of times would give 11 to 10.
    row = row_of("broadcast", HERE, [20.0, 110.0, 11.0], [10.0, 100.0, 1.0])
    assert row.ratios("gloo", "shoal") == [2.0, 1.1, 11.0]
    assert grid_lines([row])[1].endswith("x2.00")
    failed = Result(HERE, {"gloo": [1.0], "shoal": []}, {"shoal": "it died"})
    assert grid_lines([failed])[1].split() == ["all_reduce", "1", "KiB", "-"]
    for ratios, is_uncertain in (
        *(([4.0, 4.0], False), ([0.5, 0.5], False)),
        *(([0.5, 2.0, 0.9], True), ([0.5, 2.0, 1.1], True)),
    ):
        assert is_close(row_of("broadcast", LAB, ratios, [1.0] * len(ratios))) == is_uncertain


def test_a_choice_is_compared_with_the_best_other_algorithm() -> None:
    rows = [
        Result(HERE, {"planner": [2.0, 2.0], "ring": [1.0, 1.0], "tree": [1.9, 1.9]}, note="ring"),
        Result(LAB, {"planner": [2.0, 2.0], "ring": [2.0, 2.0], "tree": [1.0, 1.0]}, note="ring"),
    ]
    _, cells, worst = choice_lines(rows)
    assert cells.split()[3:] == ["ring", "x1.05", "WRONG", "ring", "x2.00"]
    assert worst.endswith("all_reduce 1 KiB 4 hosts: ring takes 2.00 times as long as tree")
    assert [str(verdict) for verdict in choice_verdicts(rows)] == [
        "within 10 % of the best at 50.0% of 2 points >= 90% MISSED"
    ]


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
