"""A server bounds the memory of each job, also when jobs ask for more."""

import itertools
import resource
from pathlib import Path
from typing import Any

from process.ranks import start_ranks
from process.serving import (
    N_WORKERS,
    ServerProcess,
    are_right,
    await_that,
    is_right,
    job_env,
    new_key,
    noise,
    served_group,
    status_of,
    sums,
)
from process.stage import Lines, Stage

MEMORY = 64 << 20  # the least that --memory takes
N_AHEAD = 8  # calls of 15 MiB per worker: two workers send 5 times the memory
MORE = ["--memory", "64M"]
SPARE = 4 << 20


def in_proc(pid: int, field: str) -> int:
    """One figure of a process's memory, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) << 10


def view_of(key: Path, server: ServerProcess) -> dict[str, Any]:
    """Return the server's view of this job, once it has reported."""

    def reported() -> dict[str, Any] | None:
        views = status_of(key, server.address)["views"]
        return views[-1] if views and "staging_bytes" in views[-1] else None

    return dict(await_that(reported, "a view's report"))


def held_at_last(key: Path, server: ServerProcess) -> int:
    """Return the memory a view holds once it has stopped growing."""
    reports = [{"for_s": -1.0, "staging_bytes": -1}]

    def is_still() -> bool:
        view = view_of(key, server)
        if view["for_s"] > reports[-1]["for_s"]:  # it reports twice a second
            reports.append(view)
        held = [view["staging_bytes"] for view in reports[-2:]]
        return held[0] == held[1] > 0

    await_that(is_still, "the server to take no more")
    return int(reports[-1]["staging_bytes"])


def be_modest() -> list[bool]:
    """Call before and after the other job's greed; return True if the view stays."""
    stage, right = Stage.from_environment(), []
    with served_group(timeout_s=60.0) as group:
        pool: Any = group.pool  # type: ignore[attr-defined]
        view = pool.view
        for number in range(2):
            right.append(sums(group, number))
            if number == 0:
                stage.cue(f"modest rank {group.rank} has called")
                stage.await_cue("the greedy have called")
        right += [pool.view is view, view.n_shared == 2]
    return right


def run_into_the_limit() -> list[Any]:
    """Call while the server is refused memory, then once with its successor."""
    stage, lines, right = Stage.from_environment(), Lines(), []
    with served_group(2, timeout_s=60.0) as group:
        pool: Any = group.pool  # type: ignore[attr-defined]
        view = pool.view
        small = noise(group.rank, 0, 1_000_003)
        group.all_reduce(small)  # what the server keeps of every current call
        stage.cue(f"greedy rank {group.rank} has called")
        stage.await_cue("there is no more memory")
        data = [noise(group.rank, number) for number in range(4)]
        works = [group.all_reduce(each, async_op=True) for each in data]
        right += are_right(works, data)
        await_that(lambda: pool.view not in (None, view), "the next view")
        again = noise(group.rank, 9)
        group.all_reduce(again)
        right += [is_right(again, 9), pool.view.n_shared == 1]
        stage.meet(group.rank, N_WORKERS, "is served again")
        if group.rank == 0:
            stage.cue("the greedy have called")
    return [right, lines.texts]


def run_ahead() -> list[bool]:
    """The last rank calls once the other ranks' calls are stuck without it."""
    stage = Stage.from_environment()
    with served_group(2, timeout_s=60.0) as group:
        data = [noise(group.rank, number) for number in range(N_AHEAD)]
        if group.rank == N_WORKERS - 1:
            stage.await_cue("the server has what it can hold")
        works = [group.all_reduce(each, async_op=True) for each in data]
        stage.cue(f"greedy rank {group.rank} has called")
        right = are_right(works, data)
        stage.meet(group.rank, N_WORKERS, "has its sums")
        stage.await_cue("the memory was looked at")
        pool: Any = group.pool  # type: ignore[attr-defined]
        return [pool.view.n_shared == N_AHEAD, *right]


def test_calls_larger_than_a_jobs_memory_are_served_within_it(tmp_path: Path) -> None:
    key = new_key(tmp_path)
    # Each of two servers folds half, so its link does not bound how far it reads ahead.
    with (
        Stage() as stage,
        ServerProcess(key, host="a", more=MORE) as server,
        ServerProcess(key, host="b", more=MORE) as other,
    ):
        env = job_env(key, server.address, other.address) | dict(stage.env)
        with start_ranks(run_ahead, N_WORKERS, env=env) as ranks:
            for rank in range(N_WORKERS - 1):
                stage.await_cue(f"greedy rank {rank} has called")
            held = held_at_last(key, server)
            pid = view_of(key, server)["pid"]
            stage.cue("the server has what it can hold")
            stage.await_all(N_WORKERS, "has its sums")
            peak = in_proc(pid, "VmHWM")
            stage.cue("the memory was looked at")
            found = ranks.values()
    assert found == [[True] * (1 + N_AHEAD)] * N_WORKERS
    # Half of it is staging: half of that for windows, the rest for segments that arrive early.
    assert MEMORY // 8 < held <= MEMORY // 2
    assert peak <= MEMORY


def test_a_job_refused_memory_continues_and_does_not_affect_other_jobs(tmp_path: Path) -> None:
    keys = [new_key(tmp_path, name) for name in ("greedy", "modest")]
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
            pid = view_of(keys[0], server)["pid"]
            limit = in_proc(pid, "VmData") + SPARE
            _, before = resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))
            stage.cue("there is no more memory")
            of_greedy, of_modest = greedy.values(), modest.values()
        log = "".join(server.log)
    assert MEMORY <= before < 2 << 30  # the limit that the process has set itself
    assert of_modest == [[True] * 4] * N_WORKERS
    assert [right for right, _ in of_greedy] == [[True] * 6] * N_WORKERS, of_greedy
    reports = [line for line in of_greedy[0][1] if "has ended: " in line]
    assert len(reports) == 1
    # The number of the view depends on whether both servers arrived in one.
    assert "of the servers has ended: rank 3 (" in reports[0]
    assert "ran out of memory" in reports[0]
    assert log.count("ran out of memory") == 1
