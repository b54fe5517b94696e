"""Error feedback between hosts, by workers and servers: a server that dies changes no bit."""

from pathlib import Path
from typing import Any

import numpy as np
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

import shoal
from shoal.average import Averager, ErrorFeedback

N_STEPS = 4
KILLED_IN = 2  # the step


class Expected:
    """What all workers send in turn, and the averages."""

    def __init__(self, n_elems: int) -> None:
        self.n_elems = n_elems
        self.residuals = [np.zeros(n_elems, np.float32)] * N_WORKERS

    def step(self, number: int) -> Array:
        sent = []
        for rank, before in enumerate(self.residuals):
            x = np.zeros(self.n_elems, np.float32)  # the buffer ends with padding
            x[:N_ELEMS] = noise(rank, number)
            x += before
            sent.append(rounded(x))
            self.residuals[rank] = x - sent[-1]
        average: Array = rounded(in_order(sent) / np.float32(N_WORKERS))[:N_ELEMS]
        return average


def average_while_the_server_dies() -> list[Any]:
    pretend_hosts(1)
    stage, right = Stage.from_environment(), []
    with shoal.init(timeout_s=30.0) as group:
        averager = Averager(
            group,
            {"a": ((N_ELEMS,), "float32")},
            fusion_bytes=32 << 20,
            compress=ErrorFeedback("bf16"),
        )
        await_servers(group, 1)
        (buffer,) = averager.layout.buffers
        expected = Expected(buffer.n_elems)
        for number in range(N_STEPS):
            averager.begin()["a"][...] = noise(group.rank, number)
            if number == KILLED_IN and group.rank == N_WORKERS - 1:
                stage.await_cue("the server is dead")
            averager.ready("a")
            if number == KILLED_IN and group.rank == 0:
                stage.cue("rank 0: has called")
            averager.wait()
            right.append(averager.arrays["a"].tobytes() == expected.step(number).tobytes())
            residual = averager.state_dict()["residuals"]["a"]
            right.append(residual.tobytes() == expected.residuals[group.rank][:N_ELEMS].tobytes())
    return right


def test_a_server_lost_in_mid_step_changes_neither_averages_nor_residuals(tmp_path: Path) -> None:
    outcomes = run_and_kill_the_server(average_while_the_server_dies, N_WORKERS, new_key(tmp_path))
    assert [one.value for one in outcomes] == [[True] * 2 * N_STEPS] * N_WORKERS, outcomes
