"""`Averager` over real processes, its page, and the example."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process.ranks import run_ranks, start_ranks
from process.stage import Stage, error_of, pretend_hosts
from unit.averages import SHAPES, check, fill, shuffled

import shoal
from shoal.average import Averager
from shoal.errors import PeerLost

PROJECT = Path(__file__).parents[2]


def train(averager: Averager, step: int) -> None:
    """One step, in an order of this rank's own."""
    averager.begin()
    fill(averager, step, shuffled(averager.group.rank, step))
    averager.wait()
    check(averager, step)


def average_between(n_per_host: int) -> None:
    pretend_hosts(n_per_host)
    with shoal.init() as group:
        averager = Averager(group, SHAPES, fusion_bytes=2000)
        for step in range(6):
            train(averager, step)


def bytes_in_slots() -> int:
    worlds = shoal.dump().state["worlds"]
    return sum(peer["slot_bytes_out"] for world in worlds for peer in world["peers"])


def copied_by_averages_and_a_private_sum() -> tuple[int, int]:
    with shoal.init() as group:
        arrays = {"a": ((300_001,), "float32"), "b": ((300_001,), "float64")}
        averager = Averager(group, arrays, fusion_bytes=200_000)
        for _ in range(2):
            averager.begin()
            for name in arrays:
                averager.ready(name)
            averager.wait()
        averaged = bytes_in_slots()
        group.all_reduce(np.zeros(300_001, np.float32))
        return averaged, bytes_in_slots() - averaged


def test_inside_a_host_no_byte_of_an_average_is_copied_for_host_mates() -> None:
    for averaged, private in run_ranks(copied_by_averages_and_a_private_sum, 3):
        assert averaged == 0
        assert private > 500_000


@pytest.mark.parametrize("n_per_host", [3, 1])
def test_processes_and_hosts_average_in_orders_of_their_own(n_per_host: int) -> None:
    run_ranks(average_between, 3, n_per_host)


def die_in_mid_step(averager: Averager) -> None:
    averager.begin()
    averager.ready("weight")
    if averager.group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for name in SHAPES:
        averager.hook(name)()
    averager.wait()


def lose_a_rank() -> None:
    stage = Stage.from_environment()
    with shoal.init(timeout_s=60) as group:
        averager = Averager(group, SHAPES, fusion_bytes=2000)
        train(averager, 0)
        stage.meet(group.rank, 3, "trained")
        # It may be dead before the others begin.
        assert isinstance(error_of(die_in_mid_step, averager), PeerLost)
        assert isinstance(error_of(averager.begin), PeerLost)
        averager = Averager(group.shrink(), SHAPES, fusion_bytes=2000)
        for step in range(1, 4):
            train(averager, step)


def test_the_others_go_on_when_a_rank_dies_in_mid_step() -> None:
    with Stage() as stage, start_ranks(lose_a_rank, 3, env=stage.env) as ranks:
        outcomes = ranks.wait()
    assert "SIGKILL" in outcomes[1].died
    assert [outcomes[rank].error for rank in (0, 2)] == [None] * 2, outcomes


def run_page(source: str) -> float:
    names: dict[str, Any] = {}
    exec(source, names)
    return float(names["weights"]["out"][0, 0])


def test_the_page_about_averaging_runs_as_it_stands() -> None:
    page = (PROJECT / "docs" / "averaging.md").read_text()
    [source] = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    # The average over two ranks of rank + step, over three steps, is 0.5 + 1.5 + 2.5.
    assert run_ranks(run_page, 2, source) == [pytest.approx(1 - 0.45)] * 2


def test_the_example_learns_and_ends_with_the_same_bits_on_all_workers() -> None:
    run = subprocess.run(
        [sys.executable, PROJECT / "examples" / "train_numpy.py", "--workers=2"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")},
    )
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", run.stdout)]
    assert losses[-1] < losses[0] / 3
    bits = re.findall(r"weights ([0-9a-f]{12})", run.stdout)
    assert len(bits) == 2
    assert len(set(bits)) == 1
