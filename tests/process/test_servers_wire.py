"""A narrow wire with servers: each part and each result is rounded once by any reducer.

With error feedback a server that dies changes no bit.
"""

import contextlib
import hashlib
import itertools
import os
from collections.abc import Iterable, Sequence
from typing import Any

import mx
import numpy as np
import pytest
from contract.fold_orders import folded
from process import serving
from process.arrays import Array
from process.ranks import on_ranks
from process.serving import N_WORKERS, await_that, n_servers, noise, wait_for_all
from process.stage import pretend_hosts
from wires import BLOCKS, NARROW, block_of, rounded

import shoal
from shoal.average import Averager, ErrorFeedback
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
    total = folded(x, block=block_of(wire))
    if op == "avg":
        total /= np.float32(N_WORKERS)
    if subject and wire in BLOCKS:
        # The kernels have their own tests: this one checks that all reducers agree.
        round_to(parse_wire(wire), DType.FLOAT32, total.ctypes.data, total.size, seed=subject)
        return data.tobytes() == total.tobytes()
    return data.tobytes() == rounded(wire, total).tobytes()


@pytest.mark.parametrize("wire", NARROW if SOAK else ("bf16", "mxfp8", "mxfp4"))
@serving.with_a_dying_server()
def test_narrow_sums_keep_their_bits_with_servers_and_if_one_dies(wire: str) -> str:
    """Sum alone, with a server, while it dies, and alone again; rank 0 compares with the truth."""
    pretend_hosts(1)
    bits = hashlib.blake2b()

    def compare(data: Array, *call: Any, **how: Any) -> None:
        bits.update(data.tobytes())
        assert group.rank or is_right(data, *call, **how)

    with shoal.init(timeout_s=30.0, wire=wire) as group:
        for number in range(4):
            data, op = noise(group.rank, number, N_ELEMS), ("sum", "avg")[number % 2]
            if number == 1:
                serving.await_servers(group, 1)
                view = group.pool.view
            subject = SUBJECT if number % 3 == 0 else 0
            group.all_reduce(data, op, subject=subject)
            compare(data, number, wire, op, subject)
        assert 3 <= view.n_shared <= 4  # the first call may have found no server yet
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
    return bits.hexdigest()


def call_of(group: shoal.Group, weights: str, wire: str, n_elems: int) -> Shape:
    call = "all_reduce", f"sharded[{weights}]", DType.FLOAT32, Op.SUM, n_elems
    how = {"hosts": tuple(range(group.size)), "codec": parse_wire(wire), "rounds_own": True}
    return Shape(*call, group.rank, group.size, **how)


@pytest.mark.parametrize(
    ("size", "all_weights"),
    [(3, ("3*1|", "1,0,0|", "0,1,2|")), (4, ("3*0|1",)), (5, ("3*0|2*1", "3*0|2,5"))],
)
@on_ranks()
def test_bits_do_not_depend_on_the_reducers(size: int, all_weights: tuple[str, ...]) -> None:
    """One reducer folds its own part first, and at another its part waits for its turn."""
    pretend_hosts(1)
    with shoal.init(timeout_s=30.0) as group:
        native = group._native
        for key, (weights, wire) in enumerate(itertools.product(all_weights, NARROW), start=1):
            data, subject = noise(group.rank, key, 100_003), SUBJECT * (key % 2)
            shape = call_of(group, weights, wire, data.size)
            at = data.ctypes.data
            if group.rank >= N_WORKERS:
                native.serve(make_plan(shape, N_WORKERS))
                continue
            plan = plan_for(shape, N_WORKERS * (size > N_WORKERS))
            call = native.post_in_place(plan, key, at, 30.0, False, subject)
            assert call.wait(30.0)
            assert call.succeeded(), call.error()
            assert is_right(data, key, wire, subject=subject)
        group.barrier(name="all have their results")


class Expected:
    """The NumPy model of what workers send in turn, and of their averages."""

    def __init__(self, codec: str, n_elems: int, workers: Iterable[int]) -> None:
        self.codec, self.n_elems = codec, n_elems
        self.residuals = {rank: np.zeros(n_elems, np.float32) for rank in workers}

    def step(self, number: int) -> list[Array]:
        sent = []
        for rank, before in self.residuals.items():
            x = np.zeros(self.n_elems, np.float32)  # the buffer ends with padding
            x[:N_ELEMS] = noise(rank, number, N_ELEMS)
            x += before
            sent.append(rounded(self.codec, x))
            self.residuals[rank] = x - sent[-1]
        return sent

    def is_rounded(self, found: Array, sent: Sequence[Array]) -> bool:
        """True if `found` is a valid rounding of the average of all sent values."""
        average = folded(sent) / np.float32(N_WORKERS)
        if self.codec == "bf16":
            return found.tobytes() == rounded("bf16", average)[:N_ELEMS].tobytes()
        whole = np.zeros(self.n_elems, np.float32)
        whole[:N_ELEMS] = found
        unit = mx.FORMATS[self.codec].magnitudes[-1] - mx.FORMATS[self.codec].magnitudes[-2]
        largest = np.abs(average).reshape(-1, mx.BLOCK).max(axis=1, keepdims=True)
        # Rounded at random to one of two neighbours, at up to twice the scale to avoid clamping.
        step = 2 * unit * np.exp2(np.floor(np.log2(largest)) - mx.FORMATS[self.codec].emax)
        near = np.abs(whole - average).reshape(-1, mx.BLOCK) <= step
        same = whole.tobytes() == rounded(self.codec, whole).tobytes()
        return bool(near.all()) and same


@pytest.mark.parametrize("codec", ["bf16", "mxint8", "mxfp4"] if SOAK else ["bf16", "mxfp4"])
@serving.with_a_dying_server()
def test_a_server_lost_in_a_step_changes_no_average_or_residual(codec: str) -> str:
    pretend_hosts(1)
    bits = hashlib.blake2b()
    with shoal.init(timeout_s=30.0) as group:
        how = {"fusion_bytes": 32 << 20, "compress": ErrorFeedback(codec)}
        averager = Averager(group, {"a": ((N_ELEMS,), "float32")}, **how)
        serving.await_servers(group, 1)
        (buffer,) = averager.layout.buffers
        # Rank 0 knows the averages; the others have the same bits.
        workers = range(N_WORKERS) if group.rank == 0 else [group.rank]
        killing = serving.while_the_server_dies(group)
        expected = Expected(codec, buffer.n_elems, workers)
        for number in range(4):
            averager.begin()["a"][...] = noise(group.rank, number, N_ELEMS)
            with killing if number == 2 else contextlib.nullcontext():
                averager.ready("a")
            averager.wait()
            bits.update(averager.arrays["a"].tobytes())
            sent = expected.step(number)
            assert group.rank > 0 or expected.is_rounded(averager.arrays["a"], sent)
            residual = averager.state_dict()["residuals"]["a"]
            assert residual.tobytes() == expected.residuals[group.rank][:N_ELEMS].tobytes()
    return bits.hexdigest()
