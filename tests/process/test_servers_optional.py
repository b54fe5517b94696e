"""A job goes on through faults of its servers, and a server through those of its jobs."""

import contextlib
import ctypes
import itertools
import logging
import random
import resource
import socket
from pathlib import Path
from typing import Any

import pytest
from process import serving
from process.ranks import free_port, run_ranks, start_ranks
from process.serving import N_WORKERS, ServerProcess, check_sum, job_env, noise, served_group
from process.stage import Lines, Stage, on_stage, pretend_hosts

import shoal
from shoal.group.pool import forming, probe
from shoal.group.pool import view as pool_view
from shoal.shapes import Shape


def take_ports_and_hold_rank_0() -> list[str]:
    """First no port is free for a view; then rank 0's interpreter is held."""
    pretend_hosts(1)
    stage = Stage.from_environment()
    texts = Lines(logging.WARNING).texts
    with shoal.init(timeout_s=30.0) as group:
        serving.await_servers(group, 1)
        check_sum(group, 0)
        stage.meet(group.rank, N_WORKERS, "has one server")
        if group.rank == 0:
            stage.cue("the first view stands")
            serving.await_that(lambda: any("did not form" in text for text in texts), "no view")
        check_sum(group, 1)
        stage.cue(f"rank {group.rank}: goes on with one server")
        serving.await_servers(group, 2)
        if group.rank == 0:
            ctypes.PyDLL(None).usleep(1_500_000)  # keeps the interpreter
        check_sum(group, 2)
        serving.await_servers(group, 2)
        check_sum(group, 3)
        assert group.pool._thread.is_alive()
        stage.meet(group.rank, N_WORKERS, "has looked at its thread")  # which ends when one leaves
    return texts


def test_a_missing_port_or_a_held_interpreter_does_not_end_a_job(tmp_path: Path) -> None:
    key, second = serving.new_key(tmp_path), free_port()
    first = random.randrange(14_000, 19_000)  # `free_port` gives none of these
    ports = f"{first}-{first + 11}"
    with ServerProcess(key, host="a") as server:
        env = job_env(key, server.address, f"127.0.0.1:{second}", SHOAL_PORT_RANGE=ports)
        with on_stage(take_ports_and_hold_rank_0, N_WORKERS, env=env) as (stage, ranks):
            stage.await_cue("the first view stands")
            with contextlib.ExitStack() as on_exit:
                with contextlib.ExitStack() as taken:
                    for port in range(first, first + 12):
                        with contextlib.suppress(OSError):
                            taken.enter_context(socket.create_server(("127.0.0.1", port)))
                    on_exit.enter_context(ServerProcess(key, host="b", port=second))
                    stage.await_all(N_WORKERS, "goes on with one server")
                texts, *_ = ranks.values()
    (text,) = [line for line in texts if "did not form" in line]
    assert "cannot listen on 127.0.0.1" in text
    assert ports in text
    assert "Widen SHOAL_PORT_RANGE" in text


def warnings_of_unused_servers(ranks_per_host: int) -> list[str]:
    pretend_hosts(ranks_per_host)
    texts = Lines(logging.WARNING, "not used").texts
    with shoal.init(timeout_s=30.0) as group:
        group.barrier()
    return texts


def test_a_job_on_one_or_two_hosts_warns_once_that_servers_are_unused(tmp_path: Path) -> None:
    env = job_env(serving.new_key(tmp_path), f"127.0.0.1:{free_port()}")
    for ranks_per_host, why in ((1, "two hosts no traffic"), (2, "all workers are on one host")):
        first, second = run_ranks(warnings_of_unused_servers, 2, ranks_per_host, env=env)
        (warning,) = first
        assert why in warning
        assert second == []


def announce_impossible_plan() -> list[str]:
    lines, right_pack = Lines(), pool_view.pack

    def pack(shape: Shape) -> bytes:
        return right_pack(shape._replace(algorithm="no such algorithm"))

    pool_view.pack = pack
    with served_group() as group:
        group.barrier()  # the first call ends the view, which every rank must have seen
        for number in range(2):
            pool, view = group.pool, group.pool.view
            check_sum(group, number, 1_000_003)
            if number == 0:
                pool_view.pack = right_pack
                serving.await_that(lambda: pool.view not in (None, view), "the next view")  # noqa: B023
        assert pool.view.n_shared > 0
    return lines.texts


def test_a_server_reports_an_impossible_plan_to_the_workers(tmp_path: Path) -> None:
    keys = [serving.new_key(tmp_path, name) for name in ("one", "two")]
    with ServerProcess(*keys) as server:
        env = job_env(keys[0], server.address)
        lines, *_ = run_ranks(announce_impossible_plan, N_WORKERS, env=env)
        assert serving.status_of(keys[1], server.address)["n_jobs"] <= 1  # it lives
        assert any("cannot serve a call that worker 0 announced" in line for line in server.log)
    # On busy cores the first view may not form in time.
    texts = [line for line in lines if " of the servers has ended: " in line]
    assert len(texts) == 1, lines
    text = texts[0]
    assert "server 3 cannot serve a call that worker 0 announced: " in text
    assert "no such algorithm" in text


def call_with_servers(how: str) -> tuple[str, list[str]]:
    """Return a call's algorithm with shares, and the log lines about rates."""
    lines, found = Lines(), [2, 0, 0]
    logging.getLogger("shoal").setLevel("INFO")
    if how == "half":
        forming.measure = lambda *_: found
    if how == "silent":
        forming.answer = lambda *_: None
        probe._OF_ONE_S = 0.1
    with served_group(3) as group:
        data = noise(group.rank, 0, 1_000_003)
        work: Any = group.all_reduce(data, async_op=True)
        serving.check_all([work], [data])
        texts = [line for line in lines.texts if "reports no rate" in line]
        return work._call.shape.algorithm, texts


@pytest.mark.parametrize("how", ["real", "half", "silent"])
def test_servers_of_unknown_rate_are_used_even_if_the_probe_fails(tmp_path: Path, how: str) -> None:
    work, env = (call_with_servers, N_WORKERS, how), {"SHOAL_SERVERS_REQUIRED": "3"}
    job = serving.job_with_servers(serving.new_key(tmp_path), "abc", *work, env=env, link="")
    with job as (_, servers, ranks):
        used, logged = zip(*ranks.values(), strict=True)
    assert len(set(used)) == 1
    assert [len(each) for each in logged] == [3, 0, 0]
    # On busy cores a view of some of the servers may form first: the lines have any order.
    of_server = [[text for text in logged[0] if one.address in text] for one in servers]
    assert [len(texts) for texts in of_server] == [1, 1, 1]
    if how == "half":
        assert used[0] == "sharded[3*17|43,2*86].servers"
        assert "0.5 of a worker's rate" in of_server[0][0]
    if how == "silent":
        assert used[0] == "sharded[3*0|3*1].servers"
        assert "could not be measured" in of_server[0][0]


# A server bounds the memory of each job, also when jobs ask for more.


MEMORY = 64 << 20  # the least that --memory takes
N_AHEAD = 8  # calls of 15 MiB per worker: two workers send 5 times the memory
MORE = ["--memory", "64M"]
SPARE = 4 << 20


def in_proc(pid: int, field: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) << 10


def view_of(server: ServerProcess) -> dict[str, Any]:
    """Return the last view of the job of its first key, once it has reported."""

    def reported() -> list[dict[str, Any]]:
        return [view for view in server.views()[-1:] if "staging_bytes" in view]

    return serving.await_that(reported, "a view's report")[0]


def held_at_last(server: ServerProcess) -> int:
    reports = [{"for_s": -1.0, "staging_bytes": -1}]

    def is_still() -> bool:
        view = view_of(server)
        if view["for_s"] > reports[-1]["for_s"]:  # it reports twice a second
            reports.append(view)
        held = [view["staging_bytes"] for view in reports[-2:]]
        return held[0] == held[1] > 0

    serving.await_that(is_still, "the server to take no more")
    return int(reports[-1]["staging_bytes"])


def be_modest() -> None:
    """Call before and after the other job's greed; the view stays."""
    stage = Stage.from_environment()
    with served_group(timeout_s=60.0) as group:
        view = group.pool.view
        for number in range(2):
            check_sum(group, number)
            if number == 0:
                stage.cue(f"modest rank {group.rank} has called")
                stage.await_cue("the greedy have called")
        assert group.pool.view is view
        assert view.n_shared == 2


def run_into_the_limit() -> list[str]:
    """Call while the server is refused memory, then once with its successor."""
    stage, lines = Stage.from_environment(), Lines()
    with served_group(2, timeout_s=60.0) as group:
        pool, view = group.pool, group.pool.view
        small = noise(group.rank, 0, 1_000_003)
        group.all_reduce(small)  # what the server keeps of every current call
        stage.cue(f"greedy rank {group.rank} has called")
        stage.await_cue("there is no more memory")
        data = [noise(group.rank, number) for number in range(4)]
        serving.check_all([group.all_reduce(each, async_op=True) for each in data], data)
        serving.await_that(lambda: pool.view not in (None, view), "the next view")
        check_sum(group, 9)
        assert pool.view.n_shared == 1
        stage.meet(group.rank, N_WORKERS, "is served again")
        if group.rank == 0:
            stage.cue("the greedy have called")
    return lines.texts


def run_ahead() -> None:
    """The last rank calls once the other ranks' calls are stuck without it."""
    stage = Stage.from_environment()
    with served_group(2, timeout_s=60.0) as group:
        data = [noise(group.rank, number) for number in range(N_AHEAD)]
        if group.rank == N_WORKERS - 1:
            stage.await_cue("the server has what it can hold")
        works = [group.all_reduce(each, async_op=True) for each in data]
        stage.cue(f"rank {group.rank}: has called")
        serving.check_all(works, data)
        assert group.pool.view.n_shared == N_AHEAD
        stage.meet(group.rank, N_WORKERS, "has its sums")
        stage.await_cue("the memory was looked at")


def test_calls_larger_than_a_jobs_memory_are_served_within_it(tmp_path: Path) -> None:
    # Each of two servers folds half, so its link does not bound how far it reads ahead.
    job = serving.job_with_servers(serving.new_key(tmp_path), "ab", run_ahead, N_WORKERS, more=MORE)
    with job as (stage, (server, _), ranks):
        stage.await_all(N_WORKERS - 1, "has called")
        held = held_at_last(server)
        pid = view_of(server)["pid"]
        stage.cue("the server has what it can hold")
        stage.await_all(N_WORKERS, "has its sums")
        peak = in_proc(pid, "VmHWM")
        stage.cue("the memory was looked at")
        ranks.values()
    # Half of it is staging: half of that for windows, the rest for segments that arrive early.
    assert MEMORY // 8 < held <= MEMORY // 2
    assert peak <= MEMORY


def test_a_job_refused_memory_continues_and_does_not_affect_other_jobs(tmp_path: Path) -> None:
    keys = [serving.new_key(tmp_path, name) for name in ("greedy", "modest")]
    with (
        Stage() as stage,
        ServerProcess(*keys, host="a", more=MORE) as server,
        ServerProcess(keys[0], host="b", more=MORE) as other,
    ):
        named = [server.address, other.address], [server.address]
        envs = [job_env(key, *at) | dict(stage.env) for key, at in zip(keys, named, strict=True)]
        with (
            start_ranks(run_into_the_limit, N_WORKERS, env=envs[0]) as greedy,
            start_ranks(be_modest, N_WORKERS, env=envs[1]) as modest,
        ):
            for job, rank in itertools.product(("greedy", "modest"), range(N_WORKERS)):
                stage.await_cue(f"{job} rank {rank} has called")
            pid = view_of(server)["pid"]
            limit = in_proc(pid, "VmData") + SPARE
            _, before = resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))
            stage.cue("there is no more memory")
            texts, *_ = greedy.values()
            modest.values()
        log = "".join(server.log)
    assert MEMORY <= before < 2 << 30  # the limit that the process has set itself
    (report,) = [line for line in texts if "has ended: " in line]
    # The number of the view depends on whether both servers arrived in one.
    assert "of the servers has ended: rank 3 (" in report
    assert "ran out of memory" in report
    assert log.count("ran out of memory") == 1
