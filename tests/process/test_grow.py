"""A running group takes in newcomers, and survives whatever dies meanwhile."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from process.ranks import start_ranks
from process.stage import Stage

import shoal

LONG_S = 50.0


def check_sum(group: shoal.Group, turn: int = 0) -> None:
    """Every rank adds its own numbers; NumPy has the sum."""

    def values(rank: int) -> np.ndarray:
        return np.random.default_rng([rank, turn]).standard_normal(10_007)

    data = values(group.rank)
    group.all_reduce(data)
    np.testing.assert_allclose(data, sum(map(values, range(group.size))), atol=1e-12)


def member_or_newcomer(n_old: int) -> Any:
    """The first ranks form a group; the others come in."""
    stage = Stage.from_environment()
    rank = int(os.environ["RANK"])
    if rank >= n_old:
        address = stage.store.get("address", LONG_S).decode()
        with shoal.init(join=address, timeout_s=LONG_S) as group:
            check_sum(group)
            return group.rank, group.size
    os.environ["WORLD_SIZE"] = str(n_old)
    n_new = int(os.environ["N_RANKS"]) - n_old
    with shoal.init() as first:
        group = first.grow()
        assert group is first
        if rank == n_old - 1:
            stage.store.set("address", group.address.encode())
            while len(group.newcomers) < n_new:
                os.sched_yield()
        while group.size < n_old + n_new:
            group = group.grow()
        assert group.rank == first.rank
        check_sum(group)
        return group.rank, group.size


def test_two_newcomers_at_once_get_the_ranks_after_the_members() -> None:
    with (
        Stage() as stage,
        start_ranks(member_or_newcomer, 5, 3, env={**stage.env, "N_RANKS": "5"}) as ranks,
    ):
        outcomes = ranks.wait(60)
    for outcome in outcomes:
        assert outcome.value is not None, outcome
    assert [outcome.value for outcome in outcomes[:3]] == [(0, 5), (1, 5), (2, 5)]
    assert sorted(outcome.value for outcome in outcomes[3:]) == [(3, 5), (4, 5)]
