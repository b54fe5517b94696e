"""Calls by reserved numbers are served in any order on each worker."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from process import serving
from process.ranks import free_port, on_ranks, start_ranks
from process.serving import N_WORKERS, is_right, new_key, noise, served_group, wait_for_all
from process.stage import Stage, error_of

import shoal
from shoal.errors import UsageError
from shoal.group.pool import pool as pools


def turned(numbers: Sequence[int], rank: int) -> list[int]:
    return [*numbers[rank:], *numbers[:rank]][:: -1 if rank % 2 else 1]


def share_in_any_order() -> list[Any]:
    stage = Stage.from_environment()
    with served_group() as group:
        rank, pool = group.rank, group.pool
        group.barrier()
        numbers = group.reserve(6)
        group.skip(numbers[3])
        group.barrier()  # plain calls go on
        data = {number: noise(rank, number) for number in numbers}
        works = {numbers[5]: group.all_reduce(data[numbers[5]], number=numbers[5], async_op=True)}
        first = pool.view
        stage.cue(f"rank {rank}: has used the last")
        serving.await_servers(group, 2)
        for number in turned(numbers[:3], rank):
            works[number] = group.all_reduce(data[number], number=number, async_op=True)
        small = noise(rank, 4, 100)
        group.all_reduce(small, number=numbers[4])
        bad = [
            error_of(group.all_reduce, data[numbers[0]], number=number)
            for number in (numbers[3], numbers[0], numbers[5] + 1000)
        ]
        group.all_reduce(again := noise(rank, 9))
        wait_for_all(works.values())
        serving.await_that(lambda: len(pool._views) == 1, "the first view to end")
        n_shared = [view.n_shared for view in (first, pool.view)]
        right = [is_right(data[number], number) for number in works] + [is_right(again, 9)]
        return [all(right), [isinstance(error, UsageError) for error in bad], n_shared]


def test_calls_by_number_are_served_in_different_orders_while_views_switch(tmp_path: Path) -> None:
    key, port = new_key(tmp_path), free_port()
    with Stage() as stage, serving.ServerProcess(key, host="a") as one:
        env = serving.job_env(key, one.address, f"127.0.0.1:{port}") | dict(stage.env)
        with start_ranks(share_in_any_order, N_WORKERS, env=env) as ranks:
            stage.await_all(N_WORKERS, "has used the last")
            with serving.ServerProcess(key, port=port, host="b"):
                found = ranks.values()
    # The first view has the first call and the calls reserved before it; the
    # second has the one after them.
    assert found == [[True, [True] * 3, [4, 1]]] * N_WORKERS


def lose_a_server_between_numbers() -> list[bool]:
    """The last rank makes its calls once the server is dead, in reverse order."""
    pools._DEADLINES_S = 1000.0  # commands wake the thread, and no timer
    stage = Stage.from_environment()
    with served_group() as group:
        numbers = group.reserve(5)
        data = {number: noise(group.rank, number) for number in numbers}
        is_last = group.rank == N_WORKERS - 1
        order = turned(numbers[:3:2] if is_last else numbers[::2], group.rank)
        with serving.while_the_server_dies(group):
            if is_last:
                group.all_reduce(data[numbers[4]], number=numbers[4])  # those before it can wait
            else:
                group.skip(numbers[3])
            works = [group.all_reduce(data[each], number=each, async_op=True) for each in order]
        wait_for_all(works)
        if is_last:
            group.skip(numbers[3])
        serving.await_that(lambda: serving.n_servers(group) == 0, "no server")
        # When the server was lost, no rank had made this call, and all had made a later one.
        group.all_reduce(data[numbers[1]], number=numbers[1])
        right = [is_right(data[number], number) for number in numbers if number != numbers[3]]
        right.append(serving.sums(group, 9))
        stage.cue(f"rank {group.rank}: goes on without")
        serving.await_servers(group, 1)
        right.append(serving.sums(group, 10))
    return right


def test_a_server_killed_among_calls_by_number_costs_and_delays_no_call(
    tmp_path: Path,
) -> None:
    task, key = lose_a_server_between_numbers, new_key(tmp_path)
    found = serving.run_and_kill_the_server(task, N_WORKERS, key, comes_back=True)
    assert found == [[True] * 6] * N_WORKERS


def skip_a_number_that_others_use() -> str:
    stage = Stage.from_environment()
    with served_group(timeout_s=20.0) as group:
        (number,) = group.reserve(1)
        if group.rank == N_WORKERS - 1:
            group.skip(number)
            stage.cue("the number is skipped")
        else:
            work = group.all_reduce(noise(group.rank), number=number, async_op=True)
            stage.cue(f"rank {group.rank}: has called")
            error = error_of(work.wait)
        stage.await_cue("the server is dead")
        if group.rank == N_WORKERS - 1:
            error = error_of(group.barrier)
    return str(error)


def test_a_number_that_only_some_ranks_skip_ends_the_group_if_a_server_dies(
    tmp_path: Path,
) -> None:
    job = serving.job_with_a_server(tmp_path, skip_a_number_that_others_use)
    with job as (stage, server, ranks):
        stage.await_cue("the number is skipped")
        stage.await_all(N_WORKERS - 1, "has called")
        server.kill()
        stage.cue("the server is dead")
        texts = ranks.values()
    for text in texts:  # number 1 was the barrier in `await_servers`
        assert "called all_reduce #2, but rank 2 skipped #2" in text


@on_ranks(3)
def test_calls_by_number_match_in_any_order() -> None:
    """Without servers numbers match like names, between plain calls."""
    with shoal.init() as group:
        for turn in range(3):
            numbers = group.reserve(40)
            data = {number: noise(group.rank, number, 3 + 977 * number) for number in numbers}
            works = [
                group.all_reduce(data[number], number=number, async_op=True)
                for number in turned(numbers, group.rank * 7 + turn)
            ]
            group.barrier()
            wait_for_all(works)
            for number in numbers:
                total = sum(noise(rank, number, 3 + 977 * number) for rank in range(group.size))
                assert abs(data[number] - total).max() < 1e-4
        both = error_of(group.barrier, number=group.reserve(1)[0], name="a name")
        message = error_of(group.send, bytearray(1), (group.rank + 1) % group.size, number=1)
        assert isinstance(both, UsageError)
        assert isinstance(message, UsageError)


NAMES = ("a", "b", "c")


def call_by_name_while_a_server_dies() -> list[Any]:
    """Make named calls in a different order on each rank, and a served call among them."""
    stage = Stage.from_environment()
    with served_group() as group:
        view = group.pool.view
        data = {name: noise(group.rank, at, 1_000_003) for at, name in enumerate(NAMES)}
        served = noise(group.rank, 3, 1_000_003)
        if group.rank == N_WORKERS - 1:
            stage.await_cue("the server is dead")
        works = [
            group.all_reduce(data[NAMES[at]], name=NAMES[at], async_op=True)
            for at in turned(range(3), group.rank)
        ]
        works.append(group.all_reduce(served, async_op=True))
        stage.cue(f"rank {group.rank}: has made its calls")
        if group.rank == 0:
            stage.await_all(N_WORKERS - 1, "has made its calls")  # later calls find no server
            stage.cue("rank 0: has called")
        wait_for_all(works)
        close = [
            np.allclose(data[name], serving.wanted(at, n_elems=1_000_003), atol=1e-5)
            for at, name in enumerate(NAMES)
        ]
        stage.meet(group.rank, N_WORKERS, "has its sums")
    return [close, is_right(served, 3), group.rank == N_WORKERS - 1 or view.n_shared]


def test_calls_by_name_use_no_server_and_survive_its_death(tmp_path: Path) -> None:
    key = new_key(tmp_path)
    found = serving.run_and_kill_the_server(call_by_name_while_a_server_dies, N_WORKERS, key)
    assert found == [[[True] * 3, True, 1]] * N_WORKERS
