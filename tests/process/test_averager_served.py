"""`Averager` with reduction servers, which serve buffers in whatever order ranks send them."""

import random
from pathlib import Path

import numpy as np
from process.serving import (
    N_ELEMS,
    N_WORKERS,
    await_servers,
    job_with_a_server,
    noise,
    status_of,
)
from process.stage import Stage, pretend_hosts

import shoal
from shoal.average import Averager

N_ARRAYS = 3  # and as many buffers


def average_with_a_server() -> list[bool]:
    pretend_hosts(1)
    stage, right = Stage.from_environment(), []
    names = [f"array {i}" for i in range(N_ARRAYS)]
    with shoal.init(timeout_s=60.0) as group:
        shapes = dict.fromkeys(names, ((N_ELEMS,), "float32"))
        averager = Averager(group, shapes, fusion_bytes=16 << 20)
        await_servers(group, 1)
        for step in range(2):
            arrays = averager.begin()
            for name in random.Random(f"{group.rank} {step}").sample(names, N_ARRAYS):
                arrays[name][...] = noise(group.rank, names.index(name) + step)
                averager.ready(name)
            averager.wait()
            for i, name in enumerate(names):
                total = sum(noise(rank, i + step) for rank in range(N_WORKERS))
                right.append(bool(np.allclose(arrays[name], total / N_WORKERS, atol=1e-6)))
        stage.cue(f"rank {group.rank}: is done")
        stage.await_cue("the status was read")
    assert len(averager.layout.buffers) == N_ARRAYS
    return right


def test_buffers_in_orders_of_their_own_are_served(tmp_path: Path) -> None:
    with job_with_a_server(tmp_path, average_with_a_server) as (stage, server, ranks):
        stage.await_all(N_WORKERS, "is done")
        (view,) = status_of(server.keys[0], server.address)["views"]
        stage.cue("the status was read")
        outcomes = ranks.wait()
    assert [outcome.value for outcome in outcomes] == [[True] * 2 * N_ARRAYS] * N_WORKERS, outcomes
    assert view["n_kinds"] > 0
    assert view["algorithm"]
