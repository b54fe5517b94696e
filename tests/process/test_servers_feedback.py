"""Error feedback between hosts, by workers and servers: a server that dies changes no bit."""

import hashlib
from pathlib import Path

import mx
import numpy as np
import pytest
from process.arrays import Array
from process.serving import (
    N_ELEMS,
    N_WORKERS,
    await_servers,
    in_order,
    new_key,
    noise,
    rounded,
    run_and_kill_the_server,
)
from process.stage import Stage, pretend_hosts
from unit.feedback_model import round_flat

import shoal
from shoal.average import Averager, ErrorFeedback

N_STEPS = 4
KILLED_IN = 2  # the step


class Expected:
    """What all workers send in turn, and the averages."""

    def __init__(self, codec: str, n_elems: int) -> None:
        self.codec, self.n_elems = codec, n_elems
        self.residuals = [np.zeros(n_elems, np.float32)] * N_WORKERS

    def step(self, number: int) -> Array:
        """The average before it is rounded."""
        sent = []
        for rank, before in enumerate(self.residuals):
            x = np.zeros(self.n_elems, np.float32)  # the buffer ends with padding
            x[:N_ELEMS] = noise(rank, number)
            x += before
            sent.append(round_flat(self.codec, x))
            self.residuals[rank] = x - sent[-1]
        average: Array = in_order(sent) / np.float32(N_WORKERS)
        return average

    def is_rounded(self, found: Array, average: Array) -> bool:
        """True if `found` is what comes back of an average."""
        if self.codec == "bf16":
            return found.tobytes() == rounded(average)[:N_ELEMS].tobytes()
        whole = np.zeros(self.n_elems, np.float32)
        whole[:N_ELEMS] = found
        unit = mx.FORMATS[self.codec].magnitudes[-1] - mx.FORMATS[self.codec].magnitudes[-2]
        largest = np.abs(average).reshape(-1, mx.BLOCK).max(axis=1, keepdims=True)
        # At random to one of two neighbours, whose scale may be twice as large so as not to clamp.
        step = 2 * unit * np.exp2(np.floor(np.log2(largest)) - mx.FORMATS[self.codec].emax)
        near = np.abs(whole - average).reshape(-1, mx.BLOCK) <= step
        same = whole.tobytes() == round_flat(self.codec, whole).tobytes()
        return bool(near.all()) and same


def average_while_the_server_dies(codec: str) -> tuple[list[bool], str]:
    pretend_hosts(1)
    stage, right, bits = Stage.from_environment(), [], hashlib.blake2b()
    with shoal.init(timeout_s=30.0) as group:
        averager = Averager(
            group,
            {"a": ((N_ELEMS,), "float32")},
            fusion_bytes=32 << 20,
            compress=ErrorFeedback(codec),
        )
        await_servers(group, 1)
        (buffer,) = averager.layout.buffers
        expected = Expected(codec, buffer.n_elems)
        for number in range(N_STEPS):
            averager.begin()["a"][...] = noise(group.rank, number)
            if number == KILLED_IN and group.rank == N_WORKERS - 1:
                stage.await_cue("the server is dead")
            averager.ready("a")
            if number == KILLED_IN and group.rank == 0:
                stage.cue("rank 0: has called")
            averager.wait()
            bits.update(averager.arrays["a"].tobytes())
            right.append(expected.is_rounded(averager.arrays["a"], expected.step(number)))
            residual = averager.state_dict()["residuals"]["a"]
            right.append(residual.tobytes() == expected.residuals[group.rank][:N_ELEMS].tobytes())
    return right, bits.hexdigest()


@pytest.mark.parametrize("codec", ["bf16", "mxint8", "mxfp4"])
def test_a_server_lost_in_mid_step_changes_neither_averages_nor_residuals(
    tmp_path: Path, codec: str
) -> None:
    task = average_while_the_server_dies
    outcomes = run_and_kill_the_server(task, N_WORKERS, new_key(tmp_path), codec)
    values = [one.value for one in outcomes]
    assert values == [([True] * 2 * N_STEPS, values[0][1])] * N_WORKERS, outcomes
