"""Reduction servers: the bits are the same with and without them, also when some die.

Calls by reserved numbers are served in any order on each worker.
"""

import itertools
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from process import serving
from process.ranks import free_port, on_ranks, run_ranks, start_ranks
from process.serving import N_ELEMS, N_WORKERS, await_servers, await_that, check_sum, new_key, noise
from process.stage import Stage, error_of, on_stage, pretend_hosts

import shoal
from shoal.errors import PeerLost, ShoalError, TimedOut, UsageError
from shoal.group.pool import pool as pools

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
            data = [noise(group.rank, number) for number in range(3)]
            serving.check_all([group.all_reduce(each, async_op=True) for each in data], data)
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


def kill_while_calls_run(n_calls: int) -> None:
    stage = Stage.from_environment()
    with serving.served_group(2) as group:
        for turn in range(n_calls):
            data = [noise(group.rank, 10 * turn + k) for k in range(2)]
            works = [group.all_reduce(each, async_op=True) for each in data]
            if group.rank == 0:
                stage.cue(f"turn {turn}")
            serving.check_all(works, data, 10 * turn)


def test_servers_that_die_in_turn_at_any_moment_cost_no_call(tmp_path: Path) -> None:
    n_calls, key, env = 6, new_key(tmp_path), {"SHOAL_CHANNELS": "2"}
    job = serving.job_with_servers(key, "ab", kill_while_calls_run, N_WORKERS, n_calls, env=env)
    with job as (stage, (one, two), ranks):
        stage.await_cue("turn 1")
        one.send(signal.SIGKILL)
        stage.await_cue("turn 3")
        two.send(signal.SIGKILL)
        ranks.values()


@pytest.mark.skipif(not os.environ.get("SHOAL_SOAK"), reason="soak: minutes")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
def test_servers_that_die_and_return_repeatedly_cost_no_call(tmp_path: Path, seed: int) -> None:
    serving.run_while_servers_die(
        kill_while_calls_run, N_WORKERS, 200, new_key(tmp_path), every=10, seed=seed
    )


def call_while_a_server_drains() -> None:
    stage = Stage.from_environment()
    with serving.served_group() as group:
        data = noise(group.rank)
        if group.rank == N_WORKERS - 1:
            stage.await_cue("the server drains")
        work = group.all_reduce(data, async_op=True)
        if group.rank == 0:
            stage.cue("rank 0: has called")
        serving.check_all([work], [data])
        await_servers(group, 0)
        stage.await_cue("the server has ended")
        check_sum(group, 1)


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
        ranks.values()
        assert not [line for line in server.log if "lost" in line or "killed" in line]


def call_while_it_stands_still(comes_back: bool) -> tuple[float, str]:
    stage = Stage.from_environment()
    with serving.served_group() as group:
        stage.cue(f"rank {group.rank}: has a server")
        data = noise(group.rank)
        stage.await_cue("it is stopped")
        begun = time.monotonic()
        group.all_reduce(data)
        took_s = time.monotonic() - begun
        assert serving.is_right(data)
        await_servers(group, 1 if comes_back else 0)  # by another of its processes
        trouble = group.pool.trouble()
        stage.meet(group.rank, N_WORKERS, "has looked")
        return took_s, trouble


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
        took_s, (why, *others) = zip(*ranks.values(), strict=True)
    # 3 s of silence; it was once 5 s, and 10 s where one rank asked another.
    assert max(took_s) < 9, took_s
    assert others == [""] * (N_WORKERS - 1)
    # The parent does not answer, and the view's process is silent: either may show first.
    silent = rf"{re.escape(server.address)} (does not answer|was silent for [34]\.\d s)"
    assert not is_all or re.fullmatch(silent, why), why


def share_a_while() -> None:
    stage = Stage.from_environment()
    with serving.served_group() as group:
        check_sum(group)
        stage.cue(f"{Path(os.environ['SHOAL_KEY_FILE']).name} rank {group.rank}")
        stage.await_cue("all have called")


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
            for job in jobs:
                job.values()
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


@serving.with_a_server(N_WORKERS + 1, N_WORKERS)
def test_survivors_of_a_lost_worker_go_on_with_the_server() -> None:
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
            check_sum(survivors, 1)


def fork_and_drop() -> None:
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
    assert status == 0
    check_sum(group)
    assert serving.n_servers(group) == 1
    assert "pool view" in str(shoal.dump())
    stage.meet(group.rank, N_WORKERS, "has called")
    del group
    stage.await_cue("the servers were left")


def test_a_dropped_group_leaves_its_servers_and_a_forked_child_does_not(tmp_path: Path) -> None:
    with serving.job_with_a_server(tmp_path, fork_and_drop) as (stage, server, ranks):
        stage.await_all(N_WORKERS, "has called")
        await_that(lambda: not server.views(), "no view")
        stage.cue("the servers were left")
        ranks.values()


def turned(numbers: Sequence[int], rank: int) -> list[int]:
    return [*numbers[rank:], *numbers[:rank]][:: -1 if rank % 2 else 1]


def share_in_any_order() -> None:
    stage = Stage.from_environment()
    with serving.served_group() as group:
        rank, pool = group.rank, group.pool
        group.barrier()
        numbers = group.reserve(6)
        group.skip(numbers[3])
        group.barrier()  # plain calls go on
        data = {number: noise(rank, number) for number in numbers}
        works = {numbers[5]: group.all_reduce(data[numbers[5]], number=numbers[5], async_op=True)}
        first = pool.view
        stage.cue(f"rank {rank}: has used the last")
        await_servers(group, 2)
        second = pool.view  # NOT later: a view ends if a busy machine stops a server for 3 s
        for number in turned(numbers[:3], rank):
            works[number] = group.all_reduce(data[number], number=number, async_op=True)
        small = noise(rank, 4, 100)
        group.all_reduce(small, number=numbers[4])
        for number in (numbers[3], numbers[0], numbers[5] + 1000):
            bad = error_of(group.all_reduce, data[numbers[0]], number=number)
            assert isinstance(bad, UsageError)
        check_sum(group, 9)
        serving.wait_for_all(works.values())
        assert all(serving.is_right(data[number], number) for number in works)
        await_that(lambda: len(pool._views) == 1, "the first view to end")
        # The first view has the first call and the calls reserved before it; the
        # second has the one after them.
        assert [view.n_shared for view in (first, second)] == [4, 1]


def test_calls_by_number_are_served_in_different_orders_while_views_switch(tmp_path: Path) -> None:
    key, port = new_key(tmp_path), free_port()
    with serving.ServerProcess(key, host="a") as one:
        env = serving.job_env(key, one.address, f"127.0.0.1:{port}")
        with on_stage(share_in_any_order, N_WORKERS, env=env) as (stage, ranks):
            stage.await_all(N_WORKERS, "has used the last")
            with serving.ServerProcess(key, port=port, host="b"):
                ranks.values()


@serving.with_a_dying_server(comes_back=True)
def test_a_server_killed_among_calls_by_number_costs_and_delays_no_call() -> None:
    """The last rank makes its calls once the server is dead, in reverse order."""
    pools._DEADLINES_S = 1000.0  # commands wake the thread, and no timer
    stage = Stage.from_environment()
    with serving.served_group() as group:
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
        serving.wait_for_all(works)
        if is_last:
            group.skip(numbers[3])
        await_that(lambda: serving.n_servers(group) == 0, "no server")
        # When the server was lost, no rank had made this call, and all had made a later one.
        group.all_reduce(data[numbers[1]], number=numbers[1])
        assert all(
            serving.is_right(data[number], number) for number in numbers if number != numbers[3]
        )
        check_sum(group, 9)
        stage.cue(f"rank {group.rank}: goes on without")
        await_servers(group, 1)
        check_sum(group, 10)


def skip_a_number_that_others_use() -> str:
    stage = Stage.from_environment()
    with serving.served_group(timeout_s=20.0) as group:
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


def test_a_number_that_only_some_ranks_skip_ends_the_group_if_a_server_dies(tmp_path: Path) -> None:
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
            serving.wait_for_all(works)
            for number in numbers:
                total = sum(noise(rank, number, 3 + 977 * number) for rank in range(group.size))
                assert abs(data[number] - total).max() < 1e-4
        both = error_of(group.barrier, number=group.reserve(1)[0], name="a name")
        message = error_of(group.send, bytearray(1), (group.rank + 1) % group.size, number=1)
        assert isinstance(both, UsageError)
        assert isinstance(message, UsageError)


@serving.with_a_dying_server()
def test_calls_by_name_use_no_server_and_survive_its_death() -> None:
    """Make named calls in a different order on each rank, and a served call among them."""
    stage = Stage.from_environment()
    with serving.served_group() as group:
        view = group.pool.view
        *data, served = (noise(group.rank, number, 1_000_003) for number in range(4))
        if group.rank == N_WORKERS - 1:
            stage.await_cue("the server is dead")
        works = [
            group.all_reduce(data[at], name=f"call {at}", async_op=True)
            for at in turned(range(3), group.rank)
        ]
        works.append(group.all_reduce(served, async_op=True))
        stage.cue(f"rank {group.rank}: has made its calls")
        if group.rank == 0:
            stage.await_all(N_WORKERS - 1, "has made its calls")  # later calls find no server
            stage.cue("rank 0: has called")
        serving.wait_for_all(works)
        for at, each in enumerate(data):
            assert np.allclose(each, serving.wanted(at, n_elems=1_000_003), atol=1e-5)
        assert serving.is_right(served, 3)
        assert group.rank == N_WORKERS - 1 or view.n_shared == 1
        stage.meet(group.rank, N_WORKERS, "has its sums")
