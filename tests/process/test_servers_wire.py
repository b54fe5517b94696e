"""A narrow wire with servers: each part and each result is rounded once by any reducer."""

import hashlib
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process import serving
from process.arrays import Array
from process.ranks import run_ranks
from process.serving import N_WORKERS, await_that, in_order, n_servers, new_key, noise, wait_for_all
from process.stage import pretend_hosts
from wires import BLOCKS, NARROW, block_of, rounded

import shoal
from shoal.codec import parse_wire
from shoal.dtypes import DType, Op
from shoal.engine import make_plan, plan_for, round_to
from shoal.shapes import Shape

SOAK = bool(os.environ.get("SHOAL_SOAK"))
SUBJECT = 3 << 24 | 5 << 10
N_ELEMS = 1_000_003  # many segments for the server, and for each worker


def is_right(data: Array, number: int, wire: str, op: str = "sum", subject: int = 0) -> bool:
    """True if it has exactly the bits that docs/bits.md defines."""
    x = [rounded(wire, noise(rank, number, data.size)) for rank in range(N_WORKERS)]
    total = in_order(x, block_of(wire))
    if op == "avg":
        total /= np.float32(N_WORKERS)
    if subject and wire in BLOCKS:
        # The kernels have their own tests: this one checks that all reducers agree.
        round_to(parse_wire(wire), DType.FLOAT32, total.ctypes.data, total.size, seed=subject)
        return data.tobytes() == total.tobytes()
    return data.tobytes() == rounded(wire, total).tobytes()


def share_narrowly(wire: str) -> tuple[str, list[bool], int]:
    """Sum alone, with a server, while it dies, and alone again; rank 0 compares with the truth."""
    pretend_hosts(1)
    right, bits = list[bool](), hashlib.blake2b()

    def compare(data: Array, *call: Any, **how: Any) -> None:
        bits.update(data.tobytes())
        if group.rank == 0:
            right.append(is_right(data, *call, **how))

    with shoal.init(timeout_s=30.0, wire=wire) as group:
        for number in range(4):
            data, op = noise(group.rank, number, N_ELEMS), ("sum", "avg")[number % 2]
            if number == 1:
                serving.await_servers(group, 1)
                view = group.pool.view
            subject = SUBJECT if number % 3 == 0 else 0
            group.all_reduce(data, op, subject=subject)
            compare(data, number, wire, op, subject)
        n_shared = view.n_shared
        data = noise(group.rank, 4, N_ELEMS)
        with serving.while_the_server_dies(group):
            work = group.all_reduce(data, async_op=True, subject=SUBJECT)
        wait_for_all([work])
        compare(data, 4, wire, subject=SUBJECT)
        await_that(lambda: n_servers(group) == 0, "no server")
        group.all_reduce(data := noise(group.rank, 5, N_ELEMS))
        compare(data, 5, wire)
        group.all_reduce(data := noise(group.rank, 6, N_ELEMS), wire="identity")
        compare(data, 6, "identity")
    return bits.hexdigest(), right, n_shared


@pytest.mark.parametrize("wire", NARROW if SOAK else ("bf16", "mxfp8", "mxfp4"))
def test_narrow_sums_keep_their_bits_with_servers_and_if_one_dies(
    tmp_path: Path, wire: str
) -> None:
    found = serving.run_and_kill_the_server(share_narrowly, N_WORKERS, new_key(tmp_path), wire)
    for rank, (digest, right, n_shared) in enumerate(found):
        assert digest == found[0][0], rank
        assert right == ([True] * 7 if rank == 0 else []), rank
        assert 3 <= n_shared <= 4  # the first call may have found no server yet


def call_of(group: shoal.Group, weights: str, wire: str, n_elems: int) -> Shape:
    call = "all_reduce", f"sharded[{weights}]", DType.FLOAT32, Op.SUM, n_elems
    how = {"hosts": tuple(range(group.size)), "codec": parse_wire(wire), "rounds_own": True}
    return Shape(*call, group.rank, group.size, **how)


def reduce_by_any(all_weights: tuple[str, ...]) -> list[bool]:
    """One reducer folds its own part first, and at another its part waits for its turn."""
    pretend_hosts(1)
    right = []
    with shoal.init(timeout_s=30.0) as group:
        native = group._native
        for key, (weights, wire) in enumerate(itertools.product(all_weights, NARROW), start=1):
            data, subject = noise(group.rank, key, 100_003), SUBJECT * (key % 2)
            shape = call_of(group, weights, wire, data.size)
            at = data.ctypes.data
            if group.rank >= N_WORKERS:
                native.serve(make_plan(shape, N_WORKERS))
                continue
            plan = plan_for(shape, N_WORKERS * (group.size > N_WORKERS))
            call = native.post_in_place(plan, key, at, 30.0, False, subject)
            assert call.wait(30.0)
            assert call.succeeded(), call.error()
            right.append(is_right(data, key, wire, subject=subject))
        group.barrier(name="all have their results")
    return right


@pytest.mark.parametrize(
    ("n_servers", "all_weights"),
    [(0, ("3*1|", "1,0,0|", "0,1,2|")), (1, ("3*0|1",)), (2, ("3*0|2*1", "3*0|2,5"))],
)
def test_bits_do_not_depend_on_the_reducers(n_servers: int, all_weights: tuple[str, ...]) -> None:
    n_calls = len(all_weights) * len(NARROW)
    results = run_ranks(reduce_by_any, N_WORKERS + n_servers, all_weights)
    assert results == [[True] * n_calls] * N_WORKERS + [[]] * n_servers
