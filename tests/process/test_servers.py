"""Reduction servers: the bits are the same with and without them, also when some die."""

import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process import serving
from process.ranks import run_ranks, start_ranks
from process.serving import N_ELEMS, N_WORKERS, await_servers, await_that, new_key, noise, sums
from process.stage import Stage, error_of, pretend_hosts

import shoal
from shoal.errors import PeerLost, ShoalError, TimedOut

N_CORES = len(os.sched_getaffinity(0))


def n_linked(group: shoal.Group) -> int:
    """Return the number of channels that connect this worker to the server before any call."""
    state = group.pool.view.group.mesh.state(10.0)
    peers = [channel["peers"][N_WORKERS] for channel in (state, *state.get("more", []))]
    return sum(path["state"] == "open" for peer in peers for path in peer["paths"])


def share_with_a_server(n_channels: int) -> None:
    pretend_hosts(1)
    with shoal.init(timeout_s=30.0) as group:
        for stage in ("alone or not", "with a server"):
            if stage == "with a server":
                await_servers(group, 1)
                assert n_linked(group) == n_channels
            works, arrays = [], []
            for number in range(3):
                arrays.append(noise(group.rank, number))
                works.append(group.all_reduce(arrays[-1], async_op=True))
            assert all(serving.are_right(works, arrays)), stage
        data = noise(group.rank, 7)
        group.all_reduce(data, "avg")
        assert np.allclose(data, sum(noise(r, 7) for r in range(N_WORKERS)) / N_WORKERS, atol=1e-6)
        whole = np.arange(N_ELEMS, dtype=np.int32) % 1000 * (group.rank + 1)
        group.all_reduce(whole, "max")
        assert np.array_equal(whole, np.arange(N_ELEMS) % 1000 * N_WORKERS)


@pytest.mark.parametrize("channels", ["", "2"])
def test_sums_with_servers_have_the_bits_of_bits_md(tmp_path: Path, channels: str) -> None:
    task, n_channels = share_with_a_server, min(N_CORES, int(channels or 1))
    # The second server has the least memory a job can have: half of it for 90 MiB of calls.
    how = {"env": {"SHOAL_CHANNELS": channels}, "more": ["--memory", "64M"] if channels else []}
    with serving.job_with_a_server(tmp_path, task, n_channels, **how) as (_stage, server, ranks):
        ranks.values()
        await_that(lambda: not server.views(), "the view to end")
        server.send(signal.SIGTERM)
        assert server.wait() == 0


def kill_while_calls_run(n_calls: int) -> list[bool]:
    stage, right = Stage.from_environment(), []
    with serving.served_group(2) as group:
        for turn in range(n_calls):
            data = [noise(group.rank, 10 * turn + k) for k in range(2)]
            works = [group.all_reduce(each, async_op=True) for each in data]
            if group.rank == 0:
                stage.cue(f"turn {turn}")
            right += serving.are_right(works, data, 10 * turn)
    return right


def test_servers_that_die_in_turn_at_any_moment_cost_no_call(tmp_path: Path) -> None:
    n_calls, key, env = 6, new_key(tmp_path), {"SHOAL_CHANNELS": "2"}
    job = serving.job_with_servers(key, "ab", kill_while_calls_run, N_WORKERS, n_calls, env=env)
    with job as (stage, (one, two), ranks):
        stage.await_cue("turn 1")
        one.send(signal.SIGKILL)
        stage.await_cue("turn 3")
        two.send(signal.SIGKILL)
        found = ranks.values()
    assert found == [[True] * 2 * n_calls] * N_WORKERS


@pytest.mark.skipif(not os.environ.get("SHOAL_SOAK"), reason="soak: minutes")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
def test_servers_that_die_and_return_repeatedly_cost_no_call(tmp_path: Path, seed: int) -> None:
    n_calls = 200
    found = serving.run_while_servers_die(
        kill_while_calls_run, N_WORKERS, n_calls, new_key(tmp_path), every=10, seed=seed
    )
    assert found == [[True] * 2 * n_calls] * N_WORKERS


def call_while_a_server_drains() -> list[bool]:
    stage, right = Stage.from_environment(), []
    with serving.served_group() as group:
        data = noise(group.rank)
        if group.rank == N_WORKERS - 1:
            stage.await_cue("the server drains")
        work = group.all_reduce(data, async_op=True)
        if group.rank == 0:
            stage.cue("rank 0: has called")
        serving.wait_for_all([work])
        right.append(serving.is_right(data))
        await_servers(group, 0)
        stage.await_cue("the server has ended")
        right.append(sums(group, 1))
    return right


def test_a_draining_server_finishes_its_calls_and_exits(tmp_path: Path) -> None:
    with serving.job_with_a_server(tmp_path, call_while_a_server_drains) as (stage, server, ranks):
        stage.await_cue("rank 0: has called")
        (view,) = server.views()
        os.kill(view["pid"], signal.SIGTERM)  # as an init system stops all processes of a service
        server.send(signal.SIGTERM)
        await_that(lambda: any("draining" in line for line in server.log), "draining")
        stage.cue("the server drains")
        assert server.wait(10.0) == 0
        stage.cue("the server has ended")
        found = ranks.values()
        assert not [line for line in server.log if "lost" in line or "killed" in line]
    assert found == [[True] * 2] * N_WORKERS


def call_while_it_stands_still(comes_back: bool) -> list[Any]:
    stage = Stage.from_environment()
    with serving.served_group() as group:
        stage.cue(f"rank {group.rank}: has a server")
        data = noise(group.rank)
        stage.await_cue("it is stopped")
        begun = time.monotonic()
        group.all_reduce(data)
        took_s = time.monotonic() - begun
        await_servers(group, 1 if comes_back else 0)  # by another of its processes
        trouble = group.pool.trouble()
        stage.meet(group.rank, N_WORKERS, "has looked")
        return [serving.is_right(data), took_s, trouble]


@pytest.mark.parametrize("is_all", [True, False])
def test_a_stopped_server_is_dropped_soon_and_costs_no_call(tmp_path: Path, is_all: bool) -> None:
    """Stop all its processes, or only the view's process, which is then replaced."""
    job = serving.job_with_a_server(tmp_path, call_while_it_stands_still, not is_all)
    with job as (stage, server, ranks):
        stage.await_all(N_WORKERS, "has a server")
        (view,) = server.views()
        if is_all:
            server.send(signal.SIGSTOP)
        os.kill(view["pid"], signal.SIGSTOP)
        stage.cue("it is stopped")
        found = ranks.values()
    right, took_s, (why, *others) = zip(*found, strict=True)
    assert right == (True,) * N_WORKERS
    # 1.2 s of silence; it was once 5 s, and 10 s where one rank asked another.
    assert max(took_s) < 4.5, took_s
    assert others == [""] * (N_WORKERS - 1)
    # The parent does not answer, and the view's process is silent: either may show first.
    reasons = {f"{server.address} does not answer", f"{server.address} was silent for 1.2 s"}
    assert not is_all or why in reasons


def share_a_while() -> bool:
    stage = Stage.from_environment()
    with serving.served_group() as group:
        right = sums(group)
        stage.cue(f"{Path(os.environ['SHOAL_KEY_FILE']).name} rank {group.rank}")
        stage.await_cue("all have called")
    return right


def idle_text(key: Path, address: str) -> str:
    """Return what `shoal status` prints for an idle server; empty while it is busy."""
    text = serving.status_text(key, address)
    return text if "  0 calls in flight; 0 B held, 0 B to be sent\n" in text else ""


def test_one_server_serves_two_jobs_and_reports_to_each_only_its_own(tmp_path: Path) -> None:
    keys = [new_key(tmp_path, name) for name in ("one", "two")]
    with Stage() as stage, serving.ServerProcess(*keys) as server:
        envs = [serving.job_env(key, server.address) | dict(stage.env) for key in keys]
        jobs = [start_ranks(share_a_while, N_WORKERS, env=env) for env in envs]
        with jobs[0], jobs[1]:
            for key, rank in itertools.product(keys, range(N_WORKERS)):
                stage.await_cue(f"{key.name} rank {rank}")
            states = [serving.status_of(key, server.address) for key in keys]
            text = await_that(lambda: idle_text(keys[0], server.address), "an idle server")
            stage.cue("all have called")
            values = [job.values() for job in jobs]
    assert values == [[True] * N_WORKERS] * 2
    assert [one["n_jobs"] for one in states] == [2, 2]
    assert "serves 2 of at most 16 jobs" in text
    assert "view 1: server 1 of 1, 3 workers" in text
    assert "of its link's 29 Mbit/s\n" in text
    assert "waits for" not in text
    pids = [{view["pid"] for view in one["views"]} for one in states]
    assert all(pids)
    assert not pids[0] & pids[1]


def fail_to_begin() -> str:
    pretend_hosts(1)
    Stage.from_environment().meet(int(os.environ["RANK"]), N_WORKERS, "begins")
    error = error_of(shoal.init, timeout_s=2.0)
    assert isinstance(error, ShoalError)
    return f"{type(error).__name__}: {error}"


def test_a_job_that_requires_servers_names_why_each_does_not_serve(tmp_path: Path) -> None:
    key, other = new_key(tmp_path), new_key(tmp_path, "other")
    with Stage() as stage, serving.ServerProcess(other) as server:
        servers = [server.address, "127.0.0.1:1", "no-such-name.invalid"]
        env = serving.job_env(key, *servers, SHOAL_SERVERS_REQUIRED="1") | dict(stage.env)
        texts = run_ranks(fail_to_begin, N_WORKERS, env=env)
    for text in texts:
        assert text.startswith(f"{TimedOut.__name__}: timed out: SHOAL_SERVERS_REQUIRED=1, and 0")
    assert f"{server.address} does not have our job key" in texts[0]
    assert "127.0.0.1:1 cannot be reached: Connection refused" in texts[0]
    assert "no-such-name.invalid:7077 has a name that does not resolve" in texts[0]


def shrink_and_go_on() -> bool:
    stage = Stage.from_environment()
    with serving.served_group() as group:
        data = noise(group.rank)
        if group.rank == N_WORKERS:
            stage.await_cue("all others have called")
            os.kill(os.getpid(), signal.SIGKILL)
        work = group.all_reduce(data, async_op=True)
        stage.cue(f"rank {group.rank}: has called")
        if group.rank == 0:
            stage.await_all(N_WORKERS, "has called")
            stage.cue("all others have called")
        assert isinstance(error_of(work.wait), PeerLost)
        with group.shrink() as survivors:
            await_servers(survivors, 1)
            return sums(survivors, 1)


def test_survivors_of_a_lost_worker_go_on_with_the_server(tmp_path: Path) -> None:
    job = serving.job_with_a_server(tmp_path, shrink_and_go_on, n_ranks=N_WORKERS + 1)
    with job as (*_, ranks):
        outcomes = ranks.wait()
    assert [outcome.value for outcome in outcomes] == [True] * N_WORKERS + [None], outcomes


def fork_and_drop() -> list[bool]:
    """A forked child closes the group; the parent uses it, then drops it without a close."""
    pretend_hosts(1)
    stage, group = Stage.from_environment(), shoal.init(timeout_s=30.0)
    await_servers(group, 1)
    child = os.fork()
    if child == 0:
        error = error_of(group.all_reduce, noise(0))
        group.close()
        os._exit(0 if isinstance(error, shoal.Closed) else 1)
    _, status = os.waitpid(child, 0)
    right = [status == 0, sums(group), serving.n_servers(group) == 1]
    right.append("pool view" in str(shoal.dump()))
    stage.meet(group.rank, N_WORKERS, "has called")
    del group
    stage.await_cue("the servers were left")
    return right


def test_a_dropped_group_leaves_its_servers_and_a_forked_child_does_not(tmp_path: Path) -> None:
    with serving.job_with_a_server(tmp_path, fork_and_drop) as (stage, server, ranks):
        stage.await_all(N_WORKERS, "has called")
        await_that(lambda: not server.views(), "no view")
        stage.cue("the servers were left")
        found = ranks.values()
    assert found == [[True] * 4] * N_WORKERS
