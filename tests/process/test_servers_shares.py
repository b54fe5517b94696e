"""Shares that are corrected while calls go on: the same bits, and everyone hears of it."""

import itertools
from pathlib import Path
from typing import Any

from process.ranks import start_ranks
from process.serving import (
    N_WORKERS,
    ServerProcess,
    await_servers,
    is_right,
    job_env,
    new_key,
    noise,
    status_text,
)
from process.stage import Stage, pretend_hosts

import shoal
from shoal.group.pool import correction
from shoal.plan.cluster import Nic, Pool

SLOWER = 2.0


def take_for_slower(pool: Pool, _seen: object, _known: object) -> Pool | None:
    """As if the first server's link had turned out to carry less than the other's."""
    first, other = pool.servers
    if first != other:
        return None
    return Pool((Nic(first.out / SLOWER, first.into / SLOWER), other), pool.workers)


def call_while_shares_are_corrected() -> list[Any]:
    """What was wrong, and by which shares calls were made."""
    pretend_hosts(1)
    correction.correct = take_for_slower
    correction._LEAST_US, correction._LEAST_SAMPLES = 1.0, 1  # type: ignore[misc]
    correction._LEAST_CALLS = 1  # type: ignore[misc]
    stage = Stage.from_environment()
    with shoal.init(timeout_s=30.0) as group:
        await_servers(group, 2)
        pool: Any = group.pool  # type: ignore[attr-defined]
        used, wrong, is_seen = [], 0, bytearray(1)
        for number in itertools.count():
            data = noise(group.rank, number % 3, 1_000_003)
            work: Any = group.all_reduce(data, async_op=True)
            used.append(work._call.shape.algorithm)
            work.wait()
            wrong += not is_right(data, number % 3)
            if is_seen[0]:  # by all, so this call was made with it
                break
            is_seen[0] = pool.view.number == 2
            group.all_reduce(is_seen, "min")
        stage.cue(f"rank {group.rank} is done")
        stage.await_cue("status is told")
    return [wrong, used]


def test_shares_that_are_corrected_while_calls_go_on_leave_the_bits_as_they_are(
    tmp_path: Path,
) -> None:
    key = new_key(tmp_path)
    with Stage() as stage, ServerProcess(key, host="a") as one, ServerProcess(key, host="b") as two:
        env = job_env(key, one.address, two.address) | dict(stage.env)
        with start_ranks(call_while_shares_are_corrected, N_WORKERS, env=env) as ranks:
            for rank in range(N_WORKERS):
                stage.await_cue(f"rank {rank} is done")
            text = status_text(key, one.address)
            stage.cue("status is told")
            found = [outcome.value for outcome in ranks.wait()]
    wrong, used = zip(*found, strict=True)
    assert wrong == (0,) * N_WORKERS
    assert used[0] == used[1] == used[2]
    before, after = used[0][0], used[0][-1]
    assert before == "sharded[3*0|2*1].servers"
    assert after == "sharded[3*0|1,2].servers"
    assert f"measured links: server {one.address} is taken to carry" in text
