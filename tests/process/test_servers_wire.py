"""A narrow wire with servers: each part is rounded once and the result once, whoever folds."""

from pathlib import Path
from typing import Any, cast

import numpy as np
from process.arrays import Array
from process.ranks import run_ranks
from process.serving import (
    N_WORKERS,
    await_servers,
    await_that,
    in_order,
    n_servers,
    new_key,
    noise,
    rounded,
    run_and_kill_the_server,
    wait_for_all,
)
from process.stage import Stage, pretend_hosts

import shoal
from shoal.codec import Codec
from shoal.dtypes import DType, Op
from shoal.engine import plan_for
from shoal.shapes import Shape


def is_right(data: Array, number: int, op: str = "sum") -> bool:
    """Whether it has exactly the bits that docs/bits.md says."""
    total = in_order([rounded(noise(rank, number, data.size)) for rank in range(N_WORKERS)])
    if op == "avg":
        total /= np.float32(N_WORKERS)
    return data.tobytes() == rounded(total).tobytes()


def share_narrowly() -> list[Any]:
    """Alone, with a server, while it dies, and without any again."""
    pretend_hosts(1)
    stage, right = Stage.from_environment(), []
    with shoal.init(timeout_s=30.0, wire="bf16") as group:
        pool = cast("Any", group).pool
        for number in range(4):
            data, op = noise(group.rank, number), ("sum", "avg")[number % 2]
            if number == 1:
                await_servers(group, 1)
                view = pool.view
            group.all_reduce(data, op)
            right.append(is_right(data, number, op))
        n_shared = view.n_shared
        data = noise(group.rank, 4)
        if group.rank == N_WORKERS - 1:
            stage.await_cue("the server is dead")
        work = group.all_reduce(data, async_op=True)
        if group.rank == 0:
            stage.cue("rank 0: has called")
        wait_for_all([work])
        right.append(is_right(data, 4))
        await_that(lambda: n_servers(group) == 0, "no server")
        group.all_reduce(data := noise(group.rank, 5))
        right.append(is_right(data, 5))
        group.all_reduce(data := noise(group.rank, 6), wire="identity")
        right.append(data.tobytes() == in_order([noise(r, 6) for r in range(N_WORKERS)]).tobytes())
    return [right, n_shared]


def test_narrow_sums_have_the_same_bits_with_servers_and_without_and_when_one_dies(
    tmp_path: Path,
) -> None:
    outcomes = run_and_kill_the_server(share_narrowly, N_WORKERS, new_key(tmp_path))
    for outcome in outcomes:
        assert outcome.value, "\n".join(map(str, outcomes))
        right, n_shared = outcome.value
        assert right == [True] * 7, outcome
        assert 3 <= n_shared <= 4  # the first call may have found no server yet


def reduce_by_any_of_the_workers() -> list[bool]:
    """Own parts are folded first by one reducer, and wait for their turn at another."""
    pretend_hosts(1)
    right = []
    with shoal.init(timeout_s=30.0) as group:
        internals = cast("Any", group)
        for key, weights in enumerate(("3*1", "1,0,0", "0,1,2"), start=1):
            data = noise(group.rank, key, 100_003)
            shape = Shape(
                *("all_reduce", f"sharded[{weights}|]", DType.FLOAT32, Op.SUM, data.size),
                *(group.rank, group.size),
                hosts=tuple(range(group.size)),
                codec=Codec.BF16,
                rounds_own=True,
            )
            at = data.ctypes.data
            call = internals._native.post_in_place(plan_for(shape), key, at, 30.0, False, 0)
            assert call.wait(30.0)
            right.append(is_right(data, key))
    return right


def test_the_bits_do_not_tell_which_worker_folded() -> None:
    assert run_ranks(reduce_by_any_of_the_workers, N_WORKERS) == [[True] * 3] * N_WORKERS
