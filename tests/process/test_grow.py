"""A running group takes in newcomers, and survives whatever dies meanwhile."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import pytest
from process.ranks import free_port, run_ranks, start_ranks
from process.stage import Stage, error_of, pretend_hosts

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


def interrupted_member_or_newcomer(n_old: int, moment: str) -> Any:
    """As above, with one newcomer; Ctrl-C comes to rank 1 at this moment of its move."""
    stage = Stage.from_environment()
    rank, interrupted = int(os.environ["RANK"]), []
    if rank == n_old:
        address = stage.store.get("address", LONG_S).decode()
        group = shoal.init(join=address, timeout_s=LONG_S)
    else:
        os.environ["WORLD_SIZE"] = str(n_old)
        group = shoal.init(timeout_s=LONG_S)
        if rank == 0:
            stage.store.set("address", group.address.encode())
            while not group.newcomers:
                os.sched_yield()
        group.barrier()
    name = moment.partition(" ")[2]
    call = getattr(shoal.Group, name)

    def interrupt(self: shoal.Group, *args: Any, **how: Any) -> Any:
        if rank != 1 or interrupted:
            return call(self, *args, **how)
        interrupted.append(moment)
        if moment.startswith("after"):
            call(self, *args, **how)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shoal.Group, name, interrupt)
        while True:
            try:
                check_sum(group)
                if group.size > n_old:
                    break
                group = group.grow()
            except (KeyboardInterrupt, shoal.ShoalError):
                group = group.reform()
    found = group.rank, group.size, len(interrupted)
    group.barrier()
    group.close()
    return found


@pytest.mark.parametrize("moment", ["before close", "before barrier", "after barrier"])
def test_an_interrupted_member_goes_on_with_the_others(moment: str) -> None:
    with (
        Stage() as stage,
        start_ranks(interrupted_member_or_newcomer, 4, 3, moment, env=stage.env) as ranks,
    ):
        outcomes = ranks.wait(60)
    assert [outcome.value for outcome in outcomes] == [
        (0, 4, 0),
        (1, 4, 1),
        (2, 4, 0),
        (3, 4, 0),
    ], outcomes


def address_of_a_subgroup() -> Any:
    with shoal.init() as group:
        part = group.subgroup([group.rank], "part")
        return str(error_of(lambda: part.address)), str(error_of(lambda: part.newcomers))


def test_a_subgroup_takes_no_newcomers() -> None:
    (texts,) = run_ranks(address_of_a_subgroup, 1)
    for text in texts:
        assert "only the group that init returned can grow" in text


def errors_of_newcomers() -> Any:
    with shoal.init() as group:
        nowhere, door = f"127.0.0.1:{free_port()}", group.address
        found = [error_of(shoal.init, join=at, timeout_s=0.3) for at in (nowhere, door)]
        return nowhere, door, *map(str, found)


def test_a_newcomer_that_nobody_lets_in_names_the_address_and_the_cause() -> None:
    ((nowhere, door, refused, waited),) = run_ranks(errors_of_newcomers, 1)
    assert f"nothing of shoal answered at {nowhere} ([Errno 111] Connection refused)" in refused
    assert f"the members did not call grow while it waited at {door}" in waited
    for text in (refused, waited):
        assert "rank 0" not in text
        assert "MASTER_" not in text


def warnings_of_grow() -> list[str]:
    pretend_hosts(1)
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shoal").addHandler(handler)
    with shoal.init() as group:
        for _ in range(3):
            assert group.grow() is group
        group.barrier()
    return [text for text in texts if "cannot listen for newcomers" in text]


def test_a_rank_that_cannot_listen_logs_why_once() -> None:
    for texts in run_ranks(warnings_of_grow, 2):
        (text,) = texts
        assert "SHOAL_KEY_FILE" in text
