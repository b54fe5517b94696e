"""Served calls: the binding's part of native/test/test_served.cc."""

from __future__ import annotations

import pytest
from process.ranks import run_ranks

import shoal
from shoal import engine
from shoal.dtypes import DType, Op
from shoal.schedule.weighted import Piece, weighted_all_reduce

N_WORKERS = 2


def plan_of(rank: int, n_elems: int) -> engine.Plan:
    """Return an all-reduce of float32 over workers 0 and 1 and server 2: one chunk each."""
    chunks = [Piece(chunk, chunk, N_WORKERS, chunk, 0, 1) for chunk in range(N_WORKERS)]
    halves = [0, 2 * n_elems], [2 * n_elems, 2 * n_elems]
    nothing: tuple[list[int], list[int]] = ([], [])
    data, scratch = (halves, nothing) if rank < N_WORKERS else (nothing, halves)
    return engine.Plan.make(
        program=engine.lower(weighted_all_reduce(rank, N_WORKERS, chunks), N_WORKERS + 1),
        layouts=[data, nothing, nothing, scratch],
        dtype=DType.FLOAT32,
        op=Op.SUM,
        divisor=N_WORKERS,
        codec=0,
        descriptor=f"average of {n_elems} by a server",
        agreement=f"average of {n_elems} by a server",
        by_pair=False,
        n_workers=N_WORKERS,
    )


def refuse_plans() -> list[str]:
    with shoal.init() as group:
        native = group._native
        assert isinstance(native, engine.NativeGroup)
        return [refusal(native, plan_of(rank, 8)) for rank in (0, 2)]


def refusal(native: engine.NativeGroup, plan: engine.Plan) -> str:
    try:
        native.serve(plan)
    except ValueError as error:
        return str(error)
    return ""


def test_a_plan_that_a_rank_cannot_serve_is_refused_with_the_reason() -> None:
    of_two = "a plan for 3 ranks cannot be served in a group of 2"
    assert run_ranks(refuse_plans, 2) == [[of_two] * 2] * 2
    rank_0, _, server = run_ranks(refuse_plans, 3)
    assert rank_0 == ["rank 0 is one of 2 workers, and serves nothing"] * 2
    assert server == ["a served plan may only receive, finish and send chunks of scratch", ""]


def test_a_plan_has_no_more_workers_than_its_group_has_ranks() -> None:
    builder = engine.ProgramBuilder.of(2)
    nothing: tuple[list[int], list[int]] = ([], [])
    with pytest.raises(ValueError, match="no more workers than its group has ranks"):
        engine.Plan.make(
            builder.done(), [nothing] * 4, 0, 0, 1, 0, "none", "none", False, n_workers=3
        )
