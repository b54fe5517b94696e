"""The tables of trainings: what their columns are made of, and what is written; nothing trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.scoreboard.__main__ import main
from bench.scoreboard.benchmark import Benchmark, Section
from bench.scoreboard.case import Case
from bench.scoreboard.sections import SECTIONS
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
from shoal.bench.failure import Failure
from shoal.limits import STAGING_BYTES

CASE = Case(4, 0, n_samples=3, n_hosts=4, rate_mbit=400, model="bert")


def pools_of(*ranks: dict[str, Any]) -> Any:
    """Ranks that answer a command with these, and keep what they were asked."""
    asked: list[tuple[str, str, dict[str, Any]]] = []

    def ask(library: str, _case: Case, task: str, **what: Any) -> Any:
        asked.append((library, task, what))
        return ranks

    return SimpleNamespace(ask=ask, asked=asked)


def rank(*times_s: float, losses: tuple[float, ...] = (), window_s: float = 0.0) -> dict[str, Any]:
    return {"times_s": times_s, "losses": losses or (1.0,) * len(times_s), "window_s": window_s}


def test_a_step_is_the_mean_of_the_slowest_rank() -> None:
    pools = pools_of(rank(0.1, 0.5, 0.2), rank(0.3, 0.1, 0.1))
    step_s = Trained(wrapper="torch", over="gloo").step(pools, CASE)
    assert step_s == pytest.approx((0.1 + 0.5 + 0.2) / 3)
    what = {"n_steps": 3, "n_warmup": 1, "model": "bert", "wrapper": "torch", "over": "gloo"}
    assert pools.asked == [("shoal", "train", what)]
    served = replace(CASE, n_servers=4)  # by ranks that know the servers, whatever the column
    Trained(wrapper="torch", over="gloo").step(pools, served)
    assert pools.asked[1][0] == "served torch"


def test_the_first_step_of_a_training_is_none_of_those_that_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    from bench.scoreboard import training_steps

    class Numbered(training_steps.Training):
        """Its steps take as many seconds as their number says."""

        def __init__(self) -> None:
            self._variant, self._n_taken = training_steps.Variant("paced"), 0

        def step(self) -> tuple[float, float, float, float]:
            self._n_taken += 1
            return float(self._n_taken), 0.0, 0.0, 0.0

        averager = None

    monkeypatch.setattr(training_steps.dist, "barrier", lambda: None)
    training = Numbered()
    assert training.take(2, n_warmup=1).times_s == [3.0, 4.0]
    assert training.take(2, n_warmup=1).times_s == [6.0, 7.0]


def test_a_column_that_is_made_of_others_has_no_number_where_one_of_them_has_none() -> None:
    step, alone = Kept(Trained().step), Kept(Trained().step)
    column = made_of(exposed, step, alone)
    step(pools_of(rank(0.5)), CASE)
    with pytest.raises(Failure, match="a column that it is made of has no number"):
        column(pools_of(), CASE)
    alone(pools_of(rank(0.2)), CASE)
    assert column(pools_of(), CASE) == pytest.approx(0.3)


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
def test_the_hidden_part_is_of_what_fits_into_the_window(
    exposed_s: float, window_s: float, n_layers: int, part: float
) -> None:
    assert hidden_part(1.0, exposed_s, window_s, n_layers) == pytest.approx(part)
    with pytest.raises(Failure, match="nothing could be hidden"):
        hidden_part(1.0, exposed_s, 0.0, n_layers)


def test_losses_are_compared_step_by_step_or_at_the_end() -> None:
    one, other = SimpleNamespace(losses=[9.0, 2.0, 2.2]), SimpleNamespace(losses=[9.0, 2.0, 2.0])
    assert end_difference(one, other, 2)(pools_of(), CASE) == pytest.approx(0.05)
    assert loss_difference(one, other)(pools_of(), CASE) == pytest.approx(0.1)
    other.losses = []
    for measure in (end_difference(one, other, 2), loss_difference(one, other)):
        with pytest.raises(Failure, match="not trained"):
            measure(pools_of(), CASE)


def test_one_command_fills_several_columns_with_the_most_that_a_rank_has() -> None:
    asked = Asked("order_costs", lambda case: {"n": case.n_ranks})
    with pytest.raises(Failure, match="had no answer"):
        asked.then("agree_s")(pools_of(), CASE)
    pools = pools_of(
        {"times_s": [1.0, 1.0, 3.0], "agree_s": 0.1}, {"times_s": [1.0, 2.0, 1.0], "agree_s": 0.3}
    )
    assert asked.first("times_s")(pools, CASE) == 2.0
    assert asked.then("agree_s")(pools, CASE) == 0.3
    assert asked.slowest(pools, CASE) == 1.5
    assert pools.asked == [("shoal", "order_costs", {"n": 4})]


def test_every_table_of_trainings_is_one_of_the_suite_and_is_asked_for_by_its_last_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert set(TRAINING_SECTIONS) <= set(SECTIONS)
    assert {section.part_of for section in TRAINING_SECTIONS} == {"training"}
    rows = "4, resnet, 400 Mbit/s; 4, bert, 400 Mbit/s"
    for name, label in (("buckets", rows), ("training-buckets", rows), ("flight", "4, 1 MiB")):
        assert main(["training", "--only", name, "--case", "9+9"]) == 2
        assert f"the tables' rows are {label}" in capsys.readouterr().err
    assert main(["training", "--only", "servers"]) == 2
    assert "--only training-servers: there are training, training-" in capsys.readouterr().err


def test_a_table_that_breaks_does_not_take_the_others_along(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_pools: Any, _case: Any) -> float:
        raise ZeroDivisionError("oh")

    def table(name: str, measure: Any) -> Section:
        return Section(name, "", (), (Benchmark("a", measure),), (Case(2, 4),), show_time)

    sections = (table("one", broken), table("two", lambda _pools, _case: 0.5))
    monkeypatch.setattr("bench.scoreboard.suite.SECTIONS", sections)
    drawn: list[str] = []
    options = {"only": None, "rounds": None, "collective": None, "quick": True, "case": None}
    options |= {"ranks": None, "hosts": None, "without": [], "log": None, "json": None}
    args: Any = SimpleNamespace(**options, openmpi=Path("none"), mpich=Path("none"))
    code = run_suite(args, [], lambda section, _text, _rows: drawn.append(section.name))
    told = capsys.readouterr().out
    assert code == 1
    assert "# no one: ZeroDivisionError: oh" in told
    assert "500 ms" in told
    assert drawn == ["two"]


def test_pictures_are_drawn_of_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from bench.scoreboard.pictures import draw_table

    for section in TRAINING_SECTIONS:
        rows = [
            {"row": "", "model": case.model, "n_ranks": 4, "n_servers": 0, "rounds": {}}
            for case in section.cases
        ]
        for one in section.benchmarks if len(rows) > 1 else section.benchmarks[:1]:
            rows[0]["rounds"][one.label] = [0.3, 0.2, 0.4]
        draw_table(tmp_path, section, f"# {section.name}\n", rows)
        assert (tmp_path / f"{section.name}.txt").read_text() == f"# {section.name}\n"
    drawn = {path.stem for path in tmp_path.glob("*.png")}
    no_picture = {"training-copies", "training-losses", "training-memory", "training-order"}
    assert drawn == {section.name for section in TRAINING_SECTIONS} - no_picture


PARAMETERS = {"resnet": 2.8e6, "bert": 5.3e6, "linear": 10.6e6, "paced": 4.2e6, "wide": 58.7e6}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_is_as_large_as_the_page_says_and_wide_much_larger_than_staging(name: str) -> None:
    pytest.importorskip("torch")
    from bench.scoreboard.training_models import MODELS

    parameters = list(MODELS[name]().module.parameters())
    assert sum(p.numel() for p in parameters) == pytest.approx(PARAMETERS[name], rel=0.02)
    if name == "wide":  # a copy of its gradients would show; in one host buffers are of 4 MiB
        n_bytes = sum(p.numel() * p.element_size() for p in parameters)
        assert n_bytes >= 4 * (STAGING_BYTES + (4 << 20))
