"""Closing a group with servers is quick, and costs the other workers nothing."""

import contextlib
import functools
import logging
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process.ranks import run_ranks
from process.serving import (
    N_WORKERS,
    await_that,
    is_right,
    job_env,
    new_key,
    noise,
    run_and_kill_the_server,
    served_group,
    wait_for_all,
)
from process.stage import Lines, Stage, pretend_hosts

import shoal
from shoal.group.pool import mend, view_mesh
from shoal.group.pool import pool as pools
from shoal.group.pool.protocol import Meet
from shoal.server.job import Job
from shoal.server.options import keys_of, listen
from shoal.server.server import Server

AT_ONCE_S = 3.0  # waiting for a view takes 6 s and more, see `forming_for_long`


class Absent(Server):
    """A server that accepts a view and never joins it, or also drops rank 0's connection."""

    stage: Stage
    is_gone = False

    def _serve(self, job: Job, meet: Meet) -> str:
        assert job.place is not None
        self.kept = job.place.take()  # it still listens, but answers nobody
        self.stage.cue("a view forms")
        if self.is_gone:
            self.stage.await_cue("all take part")
            self.lost(job.peer)
        return ""


@contextlib.contextmanager
def absent_server(key: Path, stage: Stage, *, is_gone: bool = False) -> Iterator[str]:
    """Run an absent server on a thread; yield its address."""
    server, is_over = Absent(listen("127.0.0.1", 0), keys_of([str(key)])), threading.Event()
    server.stage, server.is_gone = stage, is_gone

    def serve() -> None:
        while not is_over.is_set():
            server._try_turn()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield ":".join(map(str, server.addresses[0]))
    finally:
        is_over.set()
        socket.create_connection(server.addresses[0]).close()  # it wakes and checks
        thread.join()
        server._close()


def meets(group: shoal.Group) -> bool:
    """Return True if this worker takes part in forming a view."""
    pool: Any = group.pool  # type: ignore[attr-defined]
    return bool(pool._forming._is_under_way)


def forming_for_long() -> None:
    """On a rank: allow views 30 s to form instead of 3 s; a closing group waits up to 6 s."""
    view_mesh.MEETING_S = 30.0  # type: ignore[misc]


def leave(how: str) -> float:
    """Return how long leaving takes while a view forms."""
    forming_for_long()
    pretend_hosts(1)
    stage, group = Stage.from_environment(), shoal.init(timeout_s=60.0)
    stage.await_cue("a view forms")
    await_that(functools.partial(meets, group), "this worker to meet the others")
    stage.meet(group.rank, N_WORKERS, "meets")  # NOT sooner: a late worker would find no other
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
    key = new_key(tmp_path)
    with Stage() as stage, absent_server(key, stage) as address:
        env = job_env(key, address) | dict(stage.env)
        took_s = run_ranks(leave, N_WORKERS, how, env=env)
    assert max(took_s) < AT_ONCE_S, took_s


def give_a_view_up() -> float:
    """Return how long this worker waits for a server that rank 0 has lost."""
    forming_for_long()
    pretend_hosts(1)
    logging.getLogger("shoal").setLevel("INFO")
    stage, lines = Stage.from_environment(), Lines()
    with shoal.init(timeout_s=60.0) as group:
        stage.await_cue("a view forms")
        await_that(functools.partial(meets, group), "this worker to meet the others")
        stage.meet(group.rank, N_WORKERS, "meets")
        stage.cue("all take part")
        began = time.monotonic()
        if group.rank:  # rank 0 logs that the server is gone
            await_that(lambda: any("did not form" in line for line in lines.texts), "the end of it")
        took_s = time.monotonic() - began
        stage.meet(group.rank, N_WORKERS, "has given it up")
        return took_s


def test_all_workers_give_up_a_view_once_rank_0_loses_a_server_of_it(
    tmp_path: Path,
) -> None:
    key = new_key(tmp_path)
    with Stage() as stage, absent_server(key, stage, is_gone=True) as address:
        env = job_env(key, address) | dict(stage.env)
        found = run_ranks(give_a_view_up, N_WORKERS, env=env)
    assert max(found) < AT_ONCE_S, found


def leave_while_a_view_ends() -> float:
    """Rank 1 is held before it takes part in the end; return how long rank 0 takes to leave."""
    stage, in_thread, finish = Stage.from_environment(), Stage.from_environment(), pools.finish
    with served_group() as group:

        def finish_late(*how: Any) -> None:
            if group.rank == 1:
                in_thread.await_cue("one has left")
            in_thread.cue(f"rank {group.rank} ends a view")
            finish(*how)

        pools.finish = finish_late
        began = 0.0
        if group.rank == 0:
            stage.cue("rank 0: has called")
            stage.await_cue("rank 0 ends a view")
            began = time.monotonic()
            group.close()
            began -= time.monotonic()
            stage.cue("one has left")
        stage.await_cue("one has left")
    return -began


def test_a_group_closes_at_once_though_another_worker_is_held_as_a_view_ends(
    tmp_path: Path,
) -> None:
    took_s = run_and_kill_the_server(leave_while_a_view_ends, N_WORKERS, new_key(tmp_path))
    assert max(took_s) < AT_ONCE_S


def leave_when_mended() -> bool:
    """Rank 1 receives the others' parts late, and waits for a leaving rank meanwhile."""
    stage = Stage.from_environment()
    with served_group() as group:
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
        wait_for_all([work])
    stage.cue("one has left")
    return is_right(data)


def test_a_rank_that_leaves_after_a_repaired_call_costs_no_result(tmp_path: Path) -> None:
    found = run_and_kill_the_server(leave_when_mended, N_WORKERS, new_key(tmp_path))
    assert found == [True] * N_WORKERS
