"""Groups of a job's workers use servers from their first large call on; they grow, and close."""

import contextlib
import logging
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from process import serving
from process.ranks import run_ranks
from process.serving import N_WORKERS, await_servers, await_that, check_sum, new_key, noise
from process.stage import Lines, Stage, error_of, pretend_hosts

import shoal
from shoal.group import growing
from shoal.group.pool import mend, view_mesh
from shoal.group.pool import pool as pools
from shoal.group.pool.protocol import Meet
from shoal.server.job import Job
from shoal.server.options import keys_of, listen
from shoal.server.server import Server

N_ELEMS = 1_000_003


def share_in_groups() -> None:
    """Use groups of all ranks, in normal and reverse order, and of two."""
    with serving.served_group() as world:
        alike = world.subgroup(range(N_WORKERS), "alike")
        turned = world.subgroup(range(N_WORKERS)[::-1], "turned")
        assert alike.pool is turned.pool is None, "looked for servers before it had a use for them"
        for group in (alike, turned, world):
            for stage in ("first", "with a server"):
                if stage == "with a server":
                    await_servers(group, 1)
                check_sum(group, 1, N_ELEMS)
            assert group.pool.view.n_shared, group
        if world.rank < 2:
            pair = world.subgroup([0, 1], "pair")
            pair.all_reduce(noise(pair.rank, 2, N_ELEMS))
            assert pair.pool is None, "two have nothing to gain"
        alike.close()
        check_sum(turned, 3, N_ELEMS)  # after another group was closed


def test_groups_of_all_workers_are_served_from_their_first_large_call_on(tmp_path: Path) -> None:
    with serving.job_with_a_server(tmp_path, share_in_groups) as (_stage, server, ranks):
        ranks.values()
        await_that(lambda: not server.views(), "the views to end")


@serving.with_a_server()
def test_groups_of_one_name_are_served_separately_in_any_order() -> None:
    pretend_hosts(1)
    with shoal.init(timeout_s=30.0) as world:
        groups = [world.subgroup(range(N_WORKERS), "dp") for _ in range(2)]
        order = (0, 1) if world.rank == 0 else (1, 0)
        for stage in ("first", "with a server"):
            data = [noise(world.rank, at, N_ELEMS) for at in range(2)]
            serving.wait_for_all([groups[at].all_reduce(data[at], async_op=True) for at in order])
            assert all(serving.is_right(data[at], at) for at in range(2)), stage
            for group in groups:
                await_servers(group, 1)


def leave_one_after_the_other() -> None:
    pretend_hosts(1)
    stage = Stage.from_environment()
    with shoal.init(timeout_s=30.0) as world:
        group = world.subgroup(range(N_WORKERS), "part")
        group.all_reduce(noise(group.rank, 1, N_ELEMS))
        await_servers(group, 1)
        data = noise(group.rank, 2, N_ELEMS)
        work, pool = group.all_reduce(data, async_op=True), group.pool
        serving.check_all([work], [data], 2)
        if group.rank == 1:
            group.close()
            stage.cue("one has left")
        else:
            stage.await_cue("its server is dead")
        await_that(lambda: not pool._thread.is_alive(), "the thread to end")
        group.close()
        world.barrier()


def test_a_rank_that_leaves_does_not_hold_the_others_when_a_server_dies(tmp_path: Path) -> None:
    with serving.job_with_a_server(tmp_path, leave_one_after_the_other) as (stage, server, ranks):
        stage.await_cue("one has left")
        server.kill()
        stage.cue("its server is dead")
        ranks.values()


@serving.with_a_server()
def test_a_group_that_one_rank_fails_to_shrink_keeps_its_servers() -> None:
    """Shrink on rank 0 alone, twice; then make a call and shrink on all."""
    stage = Stage.from_environment()
    with serving.served_group() as group:
        if group.rank == 0:
            assert isinstance(error_of(group.shrink, timeout_s=0.05), shoal.TimedOut)
            assert isinstance(error_of(group.shrink, [N_WORKERS]), shoal.UsageError)
            stage.cue("it was in vain")
        stage.await_cue("it was in vain")
        pool = group.pool
        check_sum(group, 1, N_ELEMS)
        assert pool.view.n_shared == 1
        with group.shrink() as rest:
            await_servers(rest, 1)
            check_sum(rest, 2, N_ELEMS)
        assert not pool._thread.is_alive(), "the servers were not left"


def member_or_newcomer(n_servers: int, n_left: int) -> None:
    """Grow from three ranks to four while servers may be killed."""
    stage, rank = Stage.from_environment(), int(os.environ["RANK"])
    pretend_hosts(1)
    if rank == N_WORKERS:
        address = stage.store.get("address", 60.0).decode()
        group = shoal.init(join=address, timeout_s=60.0)
    else:
        group = grown(stage, n_servers)
    with group:
        for number in range(3):  # servers may die or return between them
            data = noise(group.rank, number)
            group.all_reduce(data)
            assert serving.is_right(data, number, N_WORKERS + 1)
            await_servers(group, n_left)
        assert group.pool.view.n_shared > 0


def grown(stage: Stage, n_servers: int) -> shoal.Group:
    os.environ["WORLD_SIZE"] = str(N_WORKERS)
    group = shoal.init(timeout_s=60.0)
    await_servers(group, n_servers)
    check_sum(group)
    form_new = growing.form_new

    def form_beside(*args: Any) -> shoal.Group:
        stage.cue("the group grows")
        stage.await_cue("go on")
        return form_new(*args)

    growing.form_new = form_beside
    stage.store.set("address", group.address.encode())
    while group.size == N_WORKERS:
        group = group.grow()
    return group


@pytest.mark.parametrize("n_killed", [0, 1])
def test_servers_serve_the_grown_group(tmp_path: Path, n_killed: int) -> None:
    task, hosts = member_or_newcomer, "ab"[: 1 + n_killed]
    job = serving.job_with_servers(new_key(tmp_path), hosts, task, N_WORKERS + 1, len(hosts), 1)
    with job as (stage, servers, ranks):
        stage.await_cue("the group grows")
        for server in servers[1:]:
            server.kill()
        stage.cue("go on")
        ranks.values()


# Closing a group with servers is quick, and costs the other workers nothing.


AT_ONCE_S = 3.0  # waiting for a view takes 6 s and more, see `group_whose_view_forms`


class Absent(Server):
    """A server that accepts a view and never joins it, or also drops rank 0's connection."""

    stage: Stage
    is_gone = False

    def _serve(self, job: Job, meet: Meet) -> str:
        self.kept = job.place.take()  # it still listens, but answers nobody
        self.stage.cue("a view forms")
        if self.is_gone:
            self.stage.await_cue("all take part")
            self.lost(job.peer)
        return ""


def run_beside_an_absent_server(
    folder: Path, task: Any, *given: Any, is_gone: bool = False
) -> list[Any]:
    """Return the results of the workers of a job with such a server."""
    key, is_over = new_key(folder), threading.Event()
    server = Absent(listen("127.0.0.1", 0), keys_of([str(key)]))

    def serve() -> None:
        while not is_over.is_set():
            server._try_turn()

    thread = threading.Thread(target=serve)
    with Stage() as stage:
        server.stage, server.is_gone = stage, is_gone
        env = serving.job_env(key, ":".join(map(str, server.addresses[0]))) | dict(stage.env)
        thread.start()
        try:
            return run_ranks(task, N_WORKERS, *given, env=env)
        finally:
            is_over.set()
            socket.create_connection(server.addresses[0]).close()  # it wakes and checks
            thread.join()
            server._close()


def group_whose_view_forms(stage: Stage) -> shoal.Group:
    """Allow views 30 s to form instead of 3 s, in which a closing group waits up to 6 s."""
    view_mesh.MEETING_S = 30.0
    pretend_hosts(1)
    group = shoal.init(timeout_s=60.0)
    stage.await_cue("a view forms")
    await_that(lambda: group.pool._forming._is_under_way, "this worker to meet the others")
    stage.meet(group.rank, N_WORKERS, "meets")  # NOT sooner: a late worker would find no other
    return group


def leave(how: str) -> float:
    stage = Stage.from_environment()
    group = group_whose_view_forms(stage)
    if group.rank != 1:
        stage.await_cue("one has left")
    began = time.monotonic()
    if how == "close":
        group.close()
    del group
    took_s = time.monotonic() - began
    stage.cue("one has left")
    return took_s


@pytest.mark.parametrize("how", ["close", "drop"])
def test_a_group_closes_at_once_though_its_servers_never_join(tmp_path: Path, how: str) -> None:
    took_s = run_beside_an_absent_server(tmp_path, leave, how)
    assert max(took_s) < AT_ONCE_S, took_s


def give_a_view_up() -> float:
    """Return how long this worker waits for a server that rank 0 has lost."""
    logging.getLogger("shoal").setLevel("INFO")
    stage, lines = Stage.from_environment(), Lines()
    with group_whose_view_forms(stage) as group:
        stage.cue("all take part")
        began = time.monotonic()
        if group.rank:  # rank 0 logs that the server is gone
            await_that(lambda: any("did not form" in line for line in lines.texts), "the end of it")
        took_s = time.monotonic() - began
        stage.meet(group.rank, N_WORKERS, "has given it up")
        return took_s


def test_all_workers_give_up_a_view_once_rank_0_loses_a_server_of_it(tmp_path: Path) -> None:
    took_s = run_beside_an_absent_server(tmp_path, give_a_view_up, is_gone=True)
    assert max(took_s) < AT_ONCE_S, took_s


@serving.with_a_dying_server()
def test_a_group_closes_at_once_though_a_worker_is_held_as_a_view_ends() -> None:
    """Rank 1 is held before it takes part in the end."""
    stage, in_thread, finish = Stage.from_environment(), Stage.from_environment(), pools.finish
    with serving.served_group() as group:

        def finish_late(*how: Any) -> None:
            if group.rank == 1:
                in_thread.await_cue("one has left")
            in_thread.cue(f"rank {group.rank} ends a view")
            finish(*how)

        pools.finish = finish_late
        if group.rank == 0:
            stage.cue("rank 0: has called")
            stage.await_cue("rank 0 ends a view")
            began = time.monotonic()
            group.close()
            took_s = time.monotonic() - began
            stage.cue("one has left")
            assert took_s < AT_ONCE_S
        stage.await_cue("one has left")


@serving.with_a_dying_server()
def test_a_rank_that_leaves_after_a_repaired_call_costs_no_result() -> None:
    """Rank 1 receives the others' parts late, and waits for a leaving rank meanwhile."""
    stage = Stage.from_environment()
    with serving.served_group() as group:
        data = noise(group.rank)
        if group.rank == 1:
            give = mend._give

            def give_late(*how: Any) -> None:
                with contextlib.suppress(shoal.TimedOut):
                    stage.await_cue("one has left", 0.5)
                give(*how)

            mend._give = give_late
            stage.await_cue("the server is dead")
        work = group.all_reduce(data, async_op=True)
        if group.rank == 0:
            stage.cue("rank 0: has called")
        serving.wait_for_all([work])
    stage.cue("one has left")
    assert serving.is_right(data)
