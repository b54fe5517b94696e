"""Error feedback between hosts, by workers and servers: a server that dies changes no bit."""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import mx
import numpy as np
import pytest
from process import serving
from process.arrays import Array
from process.serving import N_WORKERS, await_servers, in_order, new_key, noise
from process.stage import pretend_hosts
from wires import rounded

import shoal
from shoal.average import Averager, ErrorFeedback

SOAK = bool(os.environ.get("SHOAL_SOAK"))
N_ELEMS = 1_000_003
N_STEPS = 4
KILLED_IN = 2  # the step


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
        average = in_order(sent) / np.float32(N_WORKERS)
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


def average_while_the_server_dies(codec: str) -> tuple[list[bool], str]:
    pretend_hosts(1)
    right, bits = [], hashlib.blake2b()
    with shoal.init(timeout_s=30.0) as group:
        how = {"fusion_bytes": 32 << 20, "compress": ErrorFeedback(codec)}
        averager = Averager(group, {"a": ((N_ELEMS,), "float32")}, **how)
        await_servers(group, 1)
        (buffer,) = averager.layout.buffers
        # Rank 0 knows the averages; the others have the same bits.
        workers = range(N_WORKERS) if group.rank == 0 else [group.rank]
        killing = serving.while_the_server_dies(group)
        expected = Expected(codec, buffer.n_elems, workers)
        for number in range(N_STEPS):
            averager.begin()["a"][...] = noise(group.rank, number, N_ELEMS)
            with killing if number == KILLED_IN else contextlib.nullcontext():
                averager.ready("a")
            averager.wait()
            bits.update(averager.arrays["a"].tobytes())
            sent = expected.step(number)
            right.append(group.rank > 0 or expected.is_rounded(averager.arrays["a"], sent))
            residual = averager.state_dict()["residuals"]["a"]
            right.append(residual.tobytes() == expected.residuals[group.rank][:N_ELEMS].tobytes())
    return right, bits.hexdigest()


@pytest.mark.parametrize("codec", ["bf16", "mxint8", "mxfp4"] if SOAK else ["bf16", "mxfp4"])
def test_a_server_lost_in_a_step_changes_no_average_or_residual(tmp_path: Path, codec: str) -> None:
    task = average_while_the_server_dies
    found = serving.run_and_kill_the_server(task, N_WORKERS, new_key(tmp_path), codec)
    assert found == [([True] * 2 * N_STEPS, found[0][1])] * N_WORKERS
