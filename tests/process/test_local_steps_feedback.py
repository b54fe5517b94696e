"""Residuals in rounds of local steps: each counts once, even if a round fails."""

import functools
from typing import Any

import numpy as np
import pytest
from process import local_steps
from process.local_steps import Case, local_step, steps
from process.ranks import on_survivors
from process.stage import Stage
from unit.in_process import in_ranks
from wires import rounded

import shoal
from shoal.average import Averager, ChunkTopK, DiLoCo, ErrorFeedback
from shoal.errors import UsageError

STREAM = Case(every=4, fragments=2, delay=1, alpha=0.5)
start = functools.partial(local_steps.start, compress=ErrorFeedback("bf16"))


def residuals(diloco: DiLoCo, fragment: int = 0) -> dict[str, Any]:
    found = diloco.state_dict()["rounding"][fragment]["residuals"]
    return {name: value.tobytes() for name, value in found.items()}


def lost(given: dict[str, Any]) -> dict[str, Any]:
    """Return the rounding errors of values sent without a residual."""
    return {name: (one - rounded("bf16", one)).tobytes() for name, one in given.items()}


@pytest.mark.parametrize("when", ["rank 0 has finished the round", "the average is saved"])
@on_survivors(3, 2, has_stage=True)
def test_a_residual_counts_once_when_a_rank_is_lost(when: str) -> None:
    with shoal.init() as group:
        rank = group.rank
        weights, diloco = start(group, STREAM)
        steps(diloco, weights, rank, range(2), STREAM)
        given = {name: diloco.parameters[name] - weights[name] for name in ("wide", "one")}
        if when == "rank 0 has finished the round" and rank == 0:
            steps(diloco, weights, rank, range(1), STREAM)
        if when == "the average is saved":
            diloco.state_dict()
        Stage.from_environment().meet(rank, 3, when, victim=2)
        diloco.regroup(group.shrink())
        if diloco.rounds == 0:
            steps(diloco, weights, rank, range(1), STREAM)
        assert diloco.rounds == 1
        assert residuals(diloco) == lost(given)


@in_ranks(2)
def test_a_round_without_weights_does_not_change_residuals(group: shoal.Group) -> None:
    case = Case(every=1, weighted=True)
    weights, diloco = start(group, case)
    for weight in (1.0, 0.0):
        before = residuals(diloco)
        local_step(weights, group.rank)
        diloco.step(weight)
    assert any(map(any, before.values()))
    assert residuals(diloco) == before
    # The round counts here as on a rank that takes it over.
    assert diloco.state_dict()["rounding"][0]["n_steps"] == 2
    diloco.close()
    compress = ErrorFeedback("bf16")
    averager = Averager(group, {"a": ((3,), "float32")}, compress=compress, weighted=True)
    for weight in (1.0, 0.0):
        averager.begin(weight)["a"][...] = 1 / 3
        averager.ready("a")
        if weight:
            averager.wait()
        else:
            kept = averager.state_dict()["residuals"]["a"]
            with pytest.raises(UsageError, match="weights of all ranks are 0"):
                averager.wait()
    assert kept.any()
    assert averager.state_dict()["residuals"]["a"].tobytes() == kept.tobytes()


@in_ranks(2)
def test_residuals_hold_unweighted_values(group: shoal.Group) -> None:
    """Train by steps of weight 1024, whose products are exact, and by steps without weights.

    A round of one step follows rounds of four, and one of four follows it.
    """
    plain, case = Case(every=4), Case(every=4, weighted=True)
    found = []
    for one, weight in ((plain, None), (case, 1024.0)):
        weights, diloco = start(group, one)
        for n_steps in (9, 4):
            for _ in range(n_steps):
                local_step(weights, group.rank)
                diloco.step(weight)
            diloco.sync()
        assert diloco.rounds == 4
        given = diloco.state_dict()["rounding"][0]["residuals"]
        found.append({n: v.tobytes() for n, v in {**diloco.parameters, **weights}.items()})
        found[-1] |= {f"residual of {name}": one.tobytes() for name, one in given.items()}
    assert found[0] == found[1]


@in_ranks(2)
def test_a_rank_without_weight_keeps_its_residual(group: shoal.Group) -> None:
    weights, diloco = start(group, Case(every=1, weighted=True))
    for weight in (1.0, float(group.rank)):
        before = residuals(diloco)
        local_step(weights, group.rank)
        diloco.step(weight)
    assert any(map(any, before.values()))
    assert (residuals(diloco) == before) == (group.rank == 0)


@in_ranks(1)
def test_top_k_is_refused_where_rounds_have_different_weights(group: shoal.Group) -> None:
    for more in ({"weighted": True}, {"quorum": 1}):
        options: Any = {"every": 1, "compress": ChunkTopK(), **more}
        with pytest.raises(UsageError, match="cannot be used with weights or a quorum"):
            DiLoCo(group, {"w": np.ones(3, np.float32)}, **options)
