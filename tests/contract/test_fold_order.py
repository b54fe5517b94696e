"""Sharded reduction gives the bits of `fold_orders.folded` with any reducers."""

import math
from pathlib import Path

import numpy as np
import pytest
from contract.fold_orders import FLOOR_BYTES, folded, nested, order_of, own, stripes

from shoal.analysis.prove.prover import prove
from shoal.dtypes import DType, Op
from shoal.schedule import Buffer, Place, Send, find
from shoal.schedule.sharded import sharded_all_reduce
from shoal.shapes import Shape, layouts_of

FLOOR_ELEMS = FLOOR_BYTES // 4
SIZES = range(1, 10)


def lengths(size: int) -> list[int]:
    """Return lengths: zero, one, and odd ones in one stripe, in some, and in one per worker."""
    some = {FLOOR_ELEMS * k + odd for k in (1, 2, size - 1, size) for odd in (0, 7)}
    return [0, 1, 1009, *sorted(some), 3 * size * FLOOR_ELEMS + 13]


def test_the_page_for_users_has_the_same_numpy_code() -> None:
    page = (Path(__file__).parents[2] / "docs" / "bits.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    for size in SIZES:
        for n_elems in lengths(size):
            values = [own(rank, n_elems) for rank in range(size)]
            total = np.empty(n_elems, np.float32)
            exec(code, {"math": math, "n": size, "x": values, "total": total})
            assert total.tobytes() == folded(values).tobytes()


def test_stripes_begin_as_the_contract_defines() -> None:
    for size in SIZES:
        for n_elems in lengths(size):
            for dtype, item in ((DType.FLOAT32, 4), (DType.INT8, 1), (DType.FLOAT64, 8)):
                shape = Shape("all_reduce", "sharded", dtype, Op.SUM, n_elems, rank=0, size=size)
                begins, n_bytes = layouts_of(shape)[Buffer.DATA]
                want = stripes(n_elems, item, size)
                found = [(b // item, (b + n) // item) for b, n in zip(begins, n_bytes, strict=True)]
                assert found == [(cut.start, cut.stop) for cut, _ in want]


@pytest.mark.parametrize("size", [*SIZES, 16, 33])
def test_each_stripe_is_folded_from_its_first_worker_down(size: int) -> None:
    for n_stripes in {1, min(2, size), size // 2, size} - {0}:
        cut = find("all_reduce", "sharded").fitted(n_stripes * FLOOR_BYTES, size)
        proof = prove("all_reduce", cut, size, n_segments=1, window=0)
        for rank in range(size):
            for t in range(n_stripes):
                want = nested(order_of(t, size, n_stripes))
                assert proof.expressions[rank, Place(Buffer.DATA, t)] == want


def test_workers_that_all_reduce_send_to_different_ranks_at_any_time() -> None:
    for size in SIZES:
        peers = [
            [step.peer for step in sharded_all_reduce(rank, size, size) if isinstance(step, Send)]
            for rank in range(size)
        ]
        for at_a_time in zip(*peers, strict=True):
            assert sorted(at_a_time) == list(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_reduce_scatter_and_reduce_by_shards_fold_in_the_same_order(size: int) -> None:
    scattered = prove("reduce_scatter", "direct", size).expressions
    reduced = prove("reduce", "scatter_gather", size, root=size // 2).expressions
    for t in range(size):
        want = nested(order_of(t, size, size))
        assert scattered[t, Place(Buffer.OUTPUT, 0)] == want
        assert reduced[size // 2, Place(Buffer.DATA, t)] == want
