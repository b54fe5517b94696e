"""Groups of a job's workers use servers too, from their first large call on."""

import signal
from pathlib import Path
from typing import Any

from process.ranks import run_ranks
from process.serving import (
    N_WORKERS,
    ServerProcess,
    await_servers,
    await_that,
    is_right,
    job_env,
    job_with_a_server,
    new_key,
    noise,
    run_with_a_server,
    served_group,
    status_of,
    sums,
    wait_for_all,
)
from process.stage import Stage, error_of, pretend_hosts

import shoal

N_ELEMS = 1_000_003


def share_in_groups() -> None:
    """Use groups of all ranks, in normal and reverse order, and of two."""
    with served_group() as world:
        alike = world.subgroup(range(N_WORKERS), "alike")
        turned = world.subgroup(range(N_WORKERS)[::-1], "turned")
        pools: list[Any] = [group.pool for group in (alike, turned)]  # type: ignore[attr-defined]
        assert pools == [None, None], "looked for servers before it had a use for them"
        for group in (alike, turned, world):
            for stage in ("first", "with a server"):
                if stage == "with a server":
                    await_servers(group, 1)
                assert sums(group, 1, N_ELEMS), (group, stage)
            pool: Any = group.pool  # type: ignore[attr-defined]
            assert pool.view.n_shared, group
        if world.rank < 2:
            pair = world.subgroup([0, 1], "pair")
            pair.all_reduce(noise(pair.rank, 2, N_ELEMS))
            assert pair.pool is None, "two have nothing to gain"  # type: ignore[attr-defined]
        alike.close()
        assert sums(turned, 3, N_ELEMS), "after another group was closed"


def test_groups_of_all_workers_are_served_from_their_first_large_call_on(tmp_path: Path) -> None:
    key = new_key(tmp_path)
    with ServerProcess(key) as server:
        run_ranks(share_in_groups, N_WORKERS, env=job_env(key, server.address))
        await_that(lambda: not status_of(key, server.address)["views"], "the views to end")


def share_in_groups_of_one_name() -> None:
    """Use two equal groups, in a different order on one rank."""
    pretend_hosts(1)
    with shoal.init(timeout_s=30.0) as world:
        groups = [world.subgroup(range(N_WORKERS), "dp") for _ in range(2)]
        order = (0, 1) if world.rank == 0 else (1, 0)
        for stage in ("first", "with a server"):
            data = [noise(world.rank, at, N_ELEMS) for at in range(2)]
            wait_for_all([groups[at].all_reduce(data[at], async_op=True) for at in order])
            assert all(is_right(data[at], at) for at in range(2)), stage
            for group in groups:
                await_servers(group, 1)


def test_groups_of_one_name_are_served_separately_in_any_order(tmp_path: Path) -> None:
    run_with_a_server(tmp_path, share_in_groups_of_one_name)


def leave_one_after_the_other() -> bool:
    """True if a call was right, and the thread of its servers ended by itself."""
    pretend_hosts(1)
    stage = Stage.from_environment()
    with shoal.init(timeout_s=30.0) as world:
        group = world.subgroup(range(N_WORKERS), "part")
        group.all_reduce(noise(group.rank, 1, N_ELEMS))
        await_servers(group, 1)
        data = noise(group.rank, 2, N_ELEMS)
        work, pool = group.all_reduce(data, async_op=True), group.pool  # type: ignore[attr-defined]
        wait_for_all([work])
        if group.rank == 1:
            group.close()
            stage.cue("one has left")
        else:
            stage.await_cue("its server is dead")
        await_that(lambda: not pool._thread.is_alive(), "the thread to end")
        group.close()
        world.barrier()
    return is_right(data, 2)


def test_a_rank_that_leaves_does_not_hold_the_others_when_a_server_dies(tmp_path: Path) -> None:
    with job_with_a_server(tmp_path, leave_one_after_the_other) as (stage, server, ranks):
        stage.await_cue("one has left")
        server.send(signal.SIGKILL)
        server.wait()
        stage.cue("its server is dead")
        assert ranks.values() == [True] * N_WORKERS


def shrink_without_the_others() -> None:
    """Shrink on rank 0 alone, twice; then make a call and shrink on all."""
    stage = Stage.from_environment()
    with served_group() as group:
        if group.rank == 0:
            assert isinstance(error_of(group.shrink, timeout_s=0.05), shoal.TimedOut)
            assert isinstance(error_of(group.shrink, [N_WORKERS]), shoal.UsageError)
            stage.cue("it was in vain")
        stage.await_cue("it was in vain")
        data, pool = noise(group.rank, 1, N_ELEMS), group.pool  # type: ignore[attr-defined]
        group.all_reduce(data)
        assert is_right(data, 1)
        assert pool.view.n_shared == 1
        with group.shrink() as rest:
            await_servers(rest, 1)
            assert sums(rest, 2, N_ELEMS)
        assert not pool._thread.is_alive(), "the servers were not left"


def test_a_group_that_one_rank_fails_to_shrink_keeps_its_servers(tmp_path: Path) -> None:
    run_with_a_server(tmp_path, shrink_without_the_others)
