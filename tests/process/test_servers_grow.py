"""A group with reduction servers admits a newcomer, also while a server dies."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest
from process.ranks import start_ranks
from process.serving import (
    N_WORKERS,
    ServerProcess,
    await_servers,
    is_right,
    job_env,
    new_key,
    noise,
    sums,
)
from process.stage import Stage, pretend_hosts

import shoal
from shoal.group import growing

if TYPE_CHECKING:
    from pathlib import Path

LONG_S = 60.0


def member_or_newcomer(n_servers: int, n_left: int) -> tuple[int, int]:
    """Grow from three ranks to four while servers may be killed; return True if calls are right."""
    stage, rank = Stage.from_environment(), int(os.environ["RANK"])
    pretend_hosts(1)
    if rank == N_WORKERS:
        address = stage.store.get("address", LONG_S).decode()
        group = shoal.init(join=address, timeout_s=LONG_S)
    else:
        group = grown(stage, n_servers)
    with group:
        n_right = 0
        for number in range(3):  # servers may die or return between them
            data = noise(group.rank, number)
            group.all_reduce(data)
            n_right += is_right(data, number, N_WORKERS + 1)
            await_servers(group, n_left)
        pool: Any = group.pool  # type: ignore[attr-defined]
        return n_right, pool.view.n_shared > 0


def grown(stage: Stage, n_servers: int) -> shoal.Group:
    os.environ["WORLD_SIZE"] = str(N_WORKERS)
    group = shoal.init(timeout_s=LONG_S)
    await_servers(group, n_servers)
    assert sums(group)
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
    key = new_key(tmp_path)
    with Stage() as stage, ExitStack() as stack:
        servers = [
            stack.enter_context(ServerProcess(key, host=host)) for host in "ab"[: 1 + n_killed]
        ]
        env = {**stage.env, **job_env(key, *(server.address for server in servers))}
        entered = start_ranks(member_or_newcomer, N_WORKERS + 1, len(servers), 1, env=env)
        ranks = stack.enter_context(entered)
        stage.await_cue("the group grows")
        for server in servers[1:]:
            server.send(signal.SIGKILL)
            server.wait()
        stage.cue("go on")
        found = ranks.values(LONG_S)
    assert found == [(3, True)] * (N_WORKERS + 1)
