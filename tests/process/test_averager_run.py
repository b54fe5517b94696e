"""`Averager` over real processes and with a server, its docs page, and the example."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
from process.examples import names_of_page, run_example
from process.ranks import on_ranks
from process.serving import N_ELEMS, N_WORKERS, await_servers, job_with_a_server, noise
from process.stage import Stage, pretend_hosts
from unit.averages import SHAPES, average_filled, averaged, check, shuffled

import shoal
from shoal.average import Averager


@pytest.mark.parametrize("n_per_host", [3, 1])
@on_ranks(3)
def test_ranks_average_in_different_orders(n_per_host: int) -> None:
    pretend_hosts(n_per_host)
    with shoal.init() as group:
        averager = Averager(group, SHAPES, fusion_bytes=2000)
        for step in range(6):
            average_filled(averager, step, shuffled(group.rank, step))
            check(averager, step)


def bytes_in_slots() -> int:
    worlds = shoal.dump().state["worlds"]
    return sum(peer["slot_bytes_out"] for world in worlds for peer in world["peers"])


@on_ranks(3)
def test_an_average_inside_a_host_copies_no_byte_for_host_mates() -> None:
    with shoal.init() as group:
        arrays = {"a": ((300_001,), "float32"), "b": ((300_001,), "float64")}
        averager = Averager(group, arrays, fusion_bytes=200_000)
        for _ in range(2):
            averaged(averager, dict.fromkeys(arrays, 1))
        assert bytes_in_slots() == 0
        group.all_reduce(np.zeros(300_001, np.float32))  # in private memory
        assert bytes_in_slots() > 500_000


@on_ranks(2)
def test_the_page_about_averaging_runs_unchanged() -> None:
    # The mean over two ranks of rank + step, summed over three steps, is 0.5 + 1.5 + 2.5.
    names = names_of_page("averaging.md")
    assert names["weights"]["out"][0, 0] == pytest.approx(1 - 0.45)


def test_the_example_learns_and_ends_with_the_same_bits_on_all_workers() -> None:
    printed = run_example("train_numpy.py", "--workers=2")
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", printed)]
    assert losses[-1] < losses[0] / 3
    first, second = re.findall(r"weights ([0-9a-f]{12})", printed)
    assert first == second


# ---- with a server, which takes buffers in any order ----

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


def test_buffers_in_different_orders_are_served(tmp_path: Path) -> None:
    with job_with_a_server(tmp_path, average_with_a_server) as (stage, server, ranks):
        stage.await_all(N_WORKERS, "is done")
        (view,) = server.views()
        stage.cue("the status was read")
        outcomes = ranks.wait()
    assert [outcome.value for outcome in outcomes] == [[True] * 2 * N_ARRAYS] * N_WORKERS, outcomes
    assert view["n_kinds"] > 0
    assert view["algorithm"]
