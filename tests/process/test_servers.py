"""Reduction servers: the same bits with them and without, whoever comes and goes."""

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process.ranks import run_ranks, start_ranks
from process.serving import (
    N_ELEMS,
    N_WORKERS,
    ServerProcess,
    await_servers,
    await_that,
    is_right,
    job_env,
    n_servers,
    new_key,
    noise,
    status_of,
    status_text,
)
from process.stage import Stage, error_of, pretend_hosts

import shoal
from shoal.errors import PeerLost, ShoalError, TimedOut


def share_with_a_server() -> list[str]:
    """What was wrong."""
    pretend_hosts(1)
    wrong = []
    with shoal.init(timeout_s=30.0) as group:
        for stage in ("alone or not", "with a server"):
            if stage == "with a server":
                await_servers(group, 1)
            works, arrays = [], []
            for number in range(3):
                arrays.append(noise(group.rank, number))
                works.append(group.all_reduce(arrays[-1], async_op=True))
            for number, work in enumerate(works):
                assert work is not None
                work.wait()
                if not is_right(arrays[number], number):
                    wrong.append(f"{stage}: call {number}")
        data = noise(group.rank, 7)
        group.all_reduce(data, "avg")
        if not np.allclose(data, sum(noise(r, 7) for r in range(N_WORKERS)) / N_WORKERS, atol=1e-6):
            wrong.append("avg")
        whole = np.arange(N_ELEMS, dtype=np.int32) % 1000 * (group.rank + 1)
        group.all_reduce(whole, "max")
        if not np.array_equal(whole, np.arange(N_ELEMS) % 1000 * N_WORKERS):
            wrong.append("max")
    return wrong


def test_sums_that_servers_share_in_have_the_bits_that_bits_md_says(tmp_path: Path) -> None:
    key = new_key(tmp_path)
    with ServerProcess(key) as server:
        found = run_ranks(share_with_a_server, N_WORKERS, env=job_env(key, server.address))
        assert found == [[]] * N_WORKERS
        await_that(lambda: not status_of(key, server.address)["views"], "the view to end")
        server.send(signal.SIGTERM)
        assert server.wait() == 0


def lose_a_server_in_mid_call() -> list[bool]:
    """The last rank calls only when the server is dead."""
    pretend_hosts(1)
    stage, right = Stage.from_environment(), []
    with shoal.init(timeout_s=30.0) as group:
        await_servers(group, 1)
        data = [noise(group.rank, number) for number in range(4)]
        if group.rank == N_WORKERS - 1:
            stage.await_cue("the server is dead")
        works = [group.all_reduce(each, async_op=True) for each in data]
        if group.rank == 0:
            stage.cue("rank 0 has called")
        for number, work in enumerate(works):
            assert work is not None
            work.wait()
            right.append(is_right(data[number], number))
        await_that(lambda: n_servers(group) == 0, "no server")
        group.all_reduce(data[0])
        stage.cue(f"rank {group.rank} goes on without")
        await_servers(group, 1)
        again = noise(group.rank, 9)
        group.all_reduce(again)
        right.append(is_right(again, 9))
    return right


def test_a_server_that_is_killed_in_mid_call_costs_no_call_and_is_used_when_it_is_back(
    tmp_path: Path,
) -> None:
    key = new_key(tmp_path)
    with Stage() as stage, ServerProcess(key) as server:
        env = job_env(key, server.address) | dict(stage.env)
        with start_ranks(lose_a_server_in_mid_call, N_WORKERS, env=env) as ranks:
            stage.await_cue("rank 0 has called")
            server.send(signal.SIGKILL)
            server.wait()
            stage.cue("the server is dead")
            for rank in range(N_WORKERS):
                stage.await_cue(f"rank {rank} goes on without")
            with ServerProcess(key, port=server.port):
                outcomes = ranks.wait()
    assert [outcome.value for outcome in outcomes] == [[True] * 5] * N_WORKERS, outcomes


def kill_while_calls_run(n_calls: int) -> list[bool]:
    """Calls one after another and at once, while servers die."""
    pretend_hosts(1)
    stage, right = Stage.from_environment(), []
    with shoal.init(timeout_s=30.0) as group:
        await_servers(group, 2)
        for turn in range(n_calls):
            data = [noise(group.rank, 10 * turn + k) for k in range(2)]
            works = [group.all_reduce(each, async_op=True) for each in data]
            if group.rank == 0:
                stage.cue(f"turn {turn}")
            for k, work in enumerate(works):
                assert work is not None
                work.wait()
                right.append(is_right(data[k], 10 * turn + k))
    return right


def test_servers_that_die_one_after_the_other_at_any_moment_cost_no_call(tmp_path: Path) -> None:
    key, n_calls = new_key(tmp_path), 6
    with Stage() as stage, ServerProcess(key, host="a") as one, ServerProcess(key, host="b") as two:
        env = job_env(key, one.address, two.address) | dict(stage.env)
        with start_ranks(kill_while_calls_run, N_WORKERS, n_calls, env=env) as ranks:
            stage.await_cue("turn 1")
            one.send(signal.SIGKILL)
            stage.await_cue("turn 3")
            two.send(signal.SIGKILL)
            outcomes = ranks.wait()
    assert [outcome.value for outcome in outcomes] == [[True] * 2 * n_calls] * N_WORKERS, outcomes


@pytest.mark.skipif(not os.environ.get("SHOAL_SOAK"), reason="soak: minutes")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
def test_servers_that_die_and_come_back_for_a_while_cost_no_call(tmp_path: Path, seed: int) -> None:
    key, n_calls, draw = new_key(tmp_path), 200, random.Random(seed)
    with contextlib.ExitStack() as on_exit:
        stage = on_exit.enter_context(Stage())
        servers = [on_exit.enter_context(ServerProcess(key, host=host)) for host in "ab"]
        env = job_env(key, *(server.address for server in servers)) | dict(stage.env)
        ranks = on_exit.enter_context(
            start_ranks(kill_while_calls_run, N_WORKERS, n_calls, env=env)
        )
        for turn in range(5, n_calls - 5, 10):
            stage.await_cue(f"turn {turn}")
            time.sleep(draw.uniform(0.0, 0.1))
            at = draw.randrange(2)
            servers[at].send(draw.choice([signal.SIGKILL, signal.SIGTERM]))
            servers[at].wait()
            again = ServerProcess(key, port=servers[at].port, host="ab"[at])
            servers[at] = on_exit.enter_context(again)
        outcomes = ranks.wait(300.0)
    assert [outcome.value for outcome in outcomes] == [[True] * 2 * n_calls] * N_WORKERS, outcomes


def call_while_a_server_drains() -> list[bool]:
    pretend_hosts(1)
    stage, right = Stage.from_environment(), []
    with shoal.init(timeout_s=30.0) as group:
        await_servers(group, 1)
        data = noise(group.rank)
        if group.rank == N_WORKERS - 1:
            stage.await_cue("the server drains")
        work = group.all_reduce(data, async_op=True)
        if group.rank == 0:
            stage.cue("rank 0 has called")
        assert work is not None
        work.wait()
        right.append(is_right(data))
        await_servers(group, 0)
        stage.await_cue("the server has ended")
        data = noise(group.rank, 1)
        group.all_reduce(data)
        right.append(is_right(data, 1))
    return right


def test_a_server_that_drains_ends_its_calls_and_then_itself(tmp_path: Path) -> None:
    key = new_key(tmp_path)
    with Stage() as stage, ServerProcess(key) as server:
        env = job_env(key, server.address) | dict(stage.env)
        with start_ranks(call_while_a_server_drains, N_WORKERS, env=env) as ranks:
            stage.await_cue("rank 0 has called")
            server.send(signal.SIGTERM)
            await_that(lambda: any("draining" in line for line in server.log), "draining")
            stage.cue("the server drains")
            assert server.wait(10.0) == 0
            stage.cue("the server has ended")
            outcomes = ranks.wait()
        assert not [line for line in server.log if "lost" in line or "killed" in line]
    assert [outcome.value for outcome in outcomes] == [[True] * 2] * N_WORKERS, outcomes


def call_while_a_server_stands_still() -> list[Any]:
    pretend_hosts(1)
    stage = Stage.from_environment()
    with shoal.init(timeout_s=30.0) as group:
        await_servers(group, 1)
        stage.cue(f"rank {group.rank} has a server")
        stage.await_cue("the server is stopped")
        data = noise(group.rank)
        group.all_reduce(data)
        return [is_right(data), n_servers(group), group.pool.trouble()]  # type: ignore[attr-defined]


def test_a_server_that_is_stopped_is_given_up_and_costs_no_call(tmp_path: Path) -> None:
    key = new_key(tmp_path)
    with Stage() as stage, ServerProcess(key) as server:
        env = job_env(key, server.address) | dict(stage.env)
        with start_ranks(call_while_a_server_stands_still, N_WORKERS, env=env) as ranks:
            for rank in range(N_WORKERS):
                stage.await_cue(f"rank {rank} has a server")
            (view,) = status_of(key, server.address)["views"]
            server.send(signal.SIGSTOP)
            os.kill(view["pid"], signal.SIGSTOP)
            stage.cue("the server is stopped")
            outcomes = ranks.wait()
    values = [outcome.value for outcome in outcomes]
    assert values[0] == [True, 0, f"{server.address} does not answer"], outcomes
    assert values[1:] == [[True, 0, ""]] * (N_WORKERS - 1), outcomes


def share_a_while() -> bool:
    pretend_hosts(1)
    stage = Stage.from_environment()
    with shoal.init(timeout_s=30.0) as group:
        await_servers(group, 1)
        data = noise(group.rank)
        group.all_reduce(data)
        stage.cue(f"{shoal_key()} rank {group.rank}")
        stage.await_cue("all have called")
    return is_right(data)


def shoal_key() -> str:
    return Path(os.environ["SHOAL_KEY_FILE"]).name


def test_one_server_serves_two_jobs_with_two_keys_and_tells_each_of_its_own(tmp_path: Path) -> None:
    keys = [new_key(tmp_path, name) for name in ("one", "two")]
    with Stage() as stage, ServerProcess(*keys) as server:
        jobs = [
            start_ranks(
                share_a_while, N_WORKERS, env=job_env(key, server.address) | dict(stage.env)
            )
            for key in keys
        ]
        with jobs[0], jobs[1]:
            for key in keys:
                for rank in range(N_WORKERS):
                    stage.await_cue(f"{key.name} rank {rank}")
            told = [status_of(key, server.address) for key in keys]
            text = status_text(keys[0], server.address)
            stage.cue("all have called")
            values = [[outcome.value for outcome in job.wait()] for job in jobs]
    assert values == [[True] * N_WORKERS] * 2
    assert [one["n_jobs"] for one in told] == [2, 2]
    assert "serves 2 of at most 16 jobs" in text
    assert "view 1: server 1 of 1, 3 workers" in text
    pids = [{view["pid"] for view in one["views"]} for one in told]
    assert pids[0]
    assert pids[1]
    assert not pids[0] & pids[1]


def sum_once() -> bool:
    pretend_hosts(1)
    with shoal.init(timeout_s=2.0) as group:
        data = noise(group.rank)
        group.all_reduce(data)
        return is_right(data) and n_servers(group) == 0


def test_servers_that_cannot_be_used_are_named_and_the_job_goes_on(tmp_path: Path) -> None:
    key, other = new_key(tmp_path), new_key(tmp_path, "other")
    with ServerProcess(other) as server:
        servers = [server.address, "127.0.0.1:1", "no-such-name.invalid"]
        assert run_ranks(sum_once, N_WORKERS, env=job_env(key, *servers)) == [True] * N_WORKERS


def fail_to_begin() -> str:
    pretend_hosts(1)
    error = error_of(shoal.init, timeout_s=2.0)
    assert isinstance(error, ShoalError)
    return f"{type(error).__name__}: {error}"


def test_a_job_that_requires_servers_says_of_each_why_it_does_not_serve(tmp_path: Path) -> None:
    key, other = new_key(tmp_path), new_key(tmp_path, "other")
    with ServerProcess(other) as server:
        servers = [server.address, "127.0.0.1:1", "no-such-name.invalid"]
        env = job_env(key, *servers, SHOAL_SERVERS_REQUIRED="1")
        told = run_ranks(fail_to_begin, N_WORKERS, env=env)
    for text in told:
        assert text.startswith(f"{TimedOut.__name__}: timed out: SHOAL_SERVERS_REQUIRED=1, and 0")
    assert f"{server.address} holds no job key like ours" in told[0]
    assert "127.0.0.1:1 cannot be reached: Connection refused" in told[0]
    assert "no-such-name.invalid:7077 has a name that does not resolve" in told[0]


def begin_with_one_that_is_misplaced() -> bool:
    """The other server is on the host of rank 0, or so they say."""
    pretend_hosts(1)
    with shoal.init(timeout_s=30.0) as group:
        await_servers(group, 1)
        data = noise(group.rank)
        group.all_reduce(data)
        return is_right(data)


def test_a_server_on_the_host_of_a_worker_is_left_out(tmp_path: Path) -> None:
    key = new_key(tmp_path)
    with ServerProcess(key, host="0") as bad, ServerProcess(key) as good:
        env = job_env(key, bad.address, good.address)
        found = run_ranks(begin_with_one_that_is_misplaced, N_WORKERS, env=env)
    assert found == [True] * N_WORKERS


def shrink_and_go_on() -> bool:
    pretend_hosts(1)
    stage = Stage.from_environment()
    with shoal.init(timeout_s=30.0) as group:
        await_servers(group, 1)
        data = noise(group.rank)
        if group.rank == N_WORKERS:
            stage.await_cue("all others have called")
            os.kill(os.getpid(), signal.SIGKILL)
        work = group.all_reduce(data, async_op=True)
        stage.cue(f"rank {group.rank} has called")
        if group.rank == 0:
            for rank in range(1, N_WORKERS):
                stage.await_cue(f"rank {rank} has called")
            stage.cue("all others have called")
        assert work is not None
        assert isinstance(error_of(work.wait), PeerLost)
        with group.shrink() as survivors:
            await_servers(survivors, 1)
            again = noise(survivors.rank, 1)
            survivors.all_reduce(again)
            return is_right(again, 1)


def test_the_survivors_of_a_worker_go_on_with_the_server(tmp_path: Path) -> None:
    key = new_key(tmp_path)
    with Stage() as stage, ServerProcess(key) as server:
        env = job_env(key, server.address) | dict(stage.env)
        with start_ranks(shrink_and_go_on, N_WORKERS + 1, env=env) as ranks:
            outcomes = ranks.wait()
    assert [outcome.value for outcome in outcomes] == [True] * N_WORKERS + [None], outcomes


def time_out() -> list[str]:
    """A call that one worker never makes, while a server is in it; and one made after it."""
    pretend_hosts(1)
    stage = Stage.from_environment()
    with shoal.init(timeout_s=30.0) as group:
        await_servers(group, 1)
        told = []
        if group.rank < N_WORKERS - 1:
            data = noise(group.rank)
            told = [repr(error_of(group.all_reduce, data, timeout_s=0.5)) for _ in range(2)]
        stage.cue(f"rank {group.rank} has done")
        for rank in range(N_WORKERS):
            stage.await_cue(f"rank {rank} has done")
    return told


def test_a_call_that_a_worker_never_makes_ends_at_its_deadline(tmp_path: Path) -> None:
    key = new_key(tmp_path)
    with Stage() as stage, ServerProcess(key) as server:
        env = job_env(key, server.address) | dict(stage.env)
        *told, _ = run_ranks(time_out, N_WORKERS, env=env)
    for first, second in told:
        assert "TimedOut" in first
        assert "TimedOut" in second or "Closed" in second


def fork_and_drop() -> list[bool]:
    """A forked child closes the group; the parent uses it, and then drops it without closing it."""
    pretend_hosts(1)
    stage, group = Stage.from_environment(), shoal.init(timeout_s=30.0)
    await_servers(group, 1)
    child = os.fork()
    if child == 0:
        error = error_of(group.all_reduce, noise(0))
        group.close()
        os._exit(0 if isinstance(error, shoal.Closed) else 1)
    _, status = os.waitpid(child, 0)
    data = noise(group.rank)
    group.all_reduce(data)
    right = [status == 0, is_right(data), n_servers(group) == 1, "pool view" in str(shoal.dump())]
    stage.cue(f"rank {group.rank} has called")
    for rank in range(N_WORKERS):
        stage.await_cue(f"rank {rank} has called")
    del group
    stage.await_cue("the servers were left")
    return right


def test_a_group_that_is_dropped_leaves_its_servers_and_a_forked_child_does_not(
    tmp_path: Path,
) -> None:
    key = new_key(tmp_path)
    with Stage() as stage, ServerProcess(key) as server:
        env = job_env(key, server.address) | dict(stage.env)
        with start_ranks(fork_and_drop, N_WORKERS, env=env) as ranks:
            for rank in range(N_WORKERS):
                stage.await_cue(f"rank {rank} has called")
            await_that(lambda: not status_of(key, server.address)["views"], "no view")
            stage.cue("the servers were left")
            outcomes = ranks.wait()
    assert [outcome.value for outcome in outcomes] == [[True] * 4] * N_WORKERS, outcomes
