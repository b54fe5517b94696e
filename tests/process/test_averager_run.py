"""`Averager` over real processes, the page that tells of it, and the example."""

import os
import random
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

import shoal
from shoal.average import Averager
from shoal.errors import PeerLost

PROJECT = Path(__file__).parents[2]
SHAPES = {f"layer {i}": ((1 + 977 * i, 3), "float32") for i in range(12)}


def values(name: str, rank: int, step: int) -> Any:
    shape, dtype = SHAPES[name]
    source = np.random.default_rng([len(name), int(name.split()[1]), rank, step])
    return (source.integers(-64, 64, shape) / 8).astype(dtype)


def train(averager: Averager, step: int) -> bool:
    """One step, in an order of this rank's own; whether the averages are right."""
    group = averager.group
    ranks = group.view.ranks
    arrays = averager.begin()
    for name in random.Random(f"{ranks[group.rank]} {step}").sample(list(SHAPES), len(SHAPES)):
        arrays[name][...] = values(name, ranks[group.rank], step)
        averager.ready(name)
    averager.wait()
    for name in SHAPES:
        total = sum(values(name, rank, step).astype(np.float64) for rank in ranks)
        if not np.allclose(arrays[name], total / group.size, rtol=1e-6, atol=0):
            return False
    return True


def average_between(n_per_host: int, wire: str | None) -> bool:
    pretend_hosts(n_per_host)
    with shoal.init() as group:
        averager = Averager(group, SHAPES, fusion_bytes=40_000, wire=wire)
        # Multiples of 1/8 below 8 are exact in bfloat16, and so are sums of three of them.
        return all(train(averager, step) for step in range(6))


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


def test_processes_average_in_orders_of_their_own() -> None:
    assert run_ranks(average_between, 3, 3, None) == [True] * 3


def test_hosts_average_in_orders_of_their_own() -> None:
    assert run_ranks(average_between, 3, 1, None) == [True] * 3


def die_in_mid_step(averager: Averager) -> None:
    averager.begin()
    averager.ready("layer 3")
    if averager.group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for name in SHAPES:
        averager.hook(name)()
    averager.wait()


def lose_a_rank() -> tuple[bool, bool]:
    stage = Stage.from_environment()
    with shoal.init(timeout_s=60) as group:
        averager = Averager(group, SHAPES, fusion_bytes=40_000)
        fine = train(averager, 0)
        stage.meet(group.rank, 3, "trained")
        # It may be dead before the others begin.
        assert isinstance(error_of(die_in_mid_step, averager), PeerLost)
        assert isinstance(error_of(averager.begin), PeerLost)
        averager = Averager(group.shrink(), SHAPES, fusion_bytes=40_000)
        return fine, all(train(averager, step) for step in range(1, 4))


def test_the_others_go_on_when_a_rank_dies_in_mid_step() -> None:
    with Stage() as stage, start_ranks(lose_a_rank, 3, env=stage.env) as ranks:
        outcomes = ranks.wait()
    assert "SIGKILL" in outcomes[1].died
    assert [outcomes[rank].value for rank in (0, 2)] == [(True, True)] * 2, outcomes


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
