"""`Averager` over real processes and with a server, its docs page, and the example.

Averagers stepped in a different order on one rank: all ranks get an error naming both.
"""

import random
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from process import serving
from process.examples import names_of_page, run_example
from process.ranks import on_ranks
from process.serving import N_ELEMS, N_WORKERS, noise, served_group
from process.stage import Stage, error_of, pretend_hosts
from unit.averages import averaged

import shoal
from shoal.average import Averager
from shoal.errors import UsageError


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


def average_with_a_server() -> None:
    stage = Stage.from_environment()
    names = [f"array {i}" for i in range(N_ARRAYS)]
    with served_group(timeout_s=60.0) as group:
        shapes = dict.fromkeys(names, ((N_ELEMS,), "float32"))
        averager = Averager(group, shapes, fusion_bytes=16 << 20)
        assert len(averager.layout.buffers) == N_ARRAYS
        for step in range(2):
            arrays = averager.begin()
            for name in random.Random(f"{group.rank} {step}").sample(names, N_ARRAYS):
                arrays[name][...] = noise(group.rank, names.index(name) + step)
                averager.ready(name)
            averager.wait()
            for i, name in enumerate(names):
                total = sum(noise(rank, i + step) for rank in range(N_WORKERS))
                assert np.allclose(arrays[name], total / N_WORKERS, atol=1e-6)
        stage.cue(f"rank {group.rank}: is done")
        stage.await_cue("the status was read")


def test_buffers_in_different_orders_are_served(tmp_path: Path) -> None:
    with serving.job_with_a_server(tmp_path, average_with_a_server) as (stage, server, ranks):
        stage.await_all(N_WORKERS, "is done")
        (view,) = server.views()
        stage.cue("the status was read")
        ranks.values()
    assert view["n_kinds"] > 0
    assert view["algorithm"]


ODD = 1  # the rank with a different order
SOON_S = 30.0  # waiting for a deadline would take minutes

Call = Callable[[shoal.Group], Exception | None]


def step(averager: Averager) -> None:
    arrays = averager.begin()
    for name in arrays:
        averager.ready(name)
    averager.wait()


def shapes_of(model: str, *shape: int) -> dict[str, tuple[tuple[int, ...], str]]:
    return {f"{model}.{name}": (shape, "float32") for name in ("first", "last")}


def first_error(
    group: shoal.Group, call: Callable[[Averager], None], averagers: dict[str, Averager], order: str
) -> Exception | None:
    """Call with each averager in this order. Return the first error, perhaps of a barrier before.

    Other ranks may leave that, and make mismatched calls, before the last rank leaves it.
    """
    left = error_of(group.barrier)
    return left or next(filter(None, (error_of(call, averagers[model]) for model in order)), None)


def average_in(others: str, odd: str, n_elems: int, group: shoal.Group) -> Exception | None:
    """Make steps of two averagers in one order, and on the odd rank in another."""
    averagers = {model: Averager(group, shapes_of(model, n_elems)) for model in "GD"}
    order = odd if group.rank == ODD else others
    return first_error(group, step, averagers, order) or error_of(group.barrier)


def begin_in(option: str, group: shoal.Group) -> Exception | None:
    """Make steps whose first calls are not for buffers; the averagers' buffer counts differ.

    Ranks weigh arrays before sending a buffer, and leave all arrays out where allowed.
    """
    averagers = {
        model: Averager(group, shapes_of(model, n, 100), fusion_bytes=2000, **{option: True})
        for model, n in {"G": 20, "D": 5}.items()
    }

    def run(averager: Averager) -> None:
        arrays = averager.begin(1.0 if option == "weighted" else None)
        for name in arrays if option == "weighted" else ():
            averager.ready(name)
        averager.wait()

    return first_error(group, run, averagers, "DG" if group.rank == ODD else "GD")


def sum_beside_a_step(group: shoal.Group) -> Exception | None:
    """One rank sums an array as long as the buffer in which the others average."""
    averager = Averager(group, {"G.first": ((1008,), "float32")})
    averager.begin()
    length = averager.layout.buffers[0].n_elems
    error = error_of(group.barrier)
    if error is None and group.rank == ODD:
        number = averager._departures.reserve()[0]
        error = error_of(group.all_reduce, np.ones(length, np.float32), "avg", number=number)
    elif error is None:
        averager.ready("G.first")
        error = error_of(averager.wait)
    return error or error_of(group.barrier)


BOTH = [
    f"rank {ODD} (",
    "averager 1 averages 'G.first' to 'G.last', and is in step",
    "averager 2 averages 'D.first' to 'D.last', and is in step",
]
FIRST_STEPS = ["averager 1, step 1, buffer", "averager 2, step 1, buffer", *BOTH]
AHEAD = ["averager 2, step 1, buffer", "averager 1, step 2, buffer", *BOTH]

CASES: dict[str, tuple[Call, list[str]]] = {
    "another order": (partial(average_in, "GD", "DG", 1000), FIRST_STEPS),
    "a step ahead": (partial(average_in, "GDGD", "GGD", 1 << 20), AHEAD),
    "weights in another order": (partial(begin_in, "weighted"), FIRST_STEPS),
    "absent arrays in another order": (partial(begin_in, "find_unused"), FIRST_STEPS),
    "a plain sum": (sum_beside_a_step, ["for averager 1, step 1, buffer 0"]),
}


def check_named(call: Call, group: shoal.Group, facts: list[str]) -> None:
    started = time.monotonic()
    error = call(group)
    assert time.monotonic() - started < SOON_S
    assert isinstance(error, UsageError), error
    for words in facts:
        assert words in str(error), error


@pytest.mark.parametrize("ranks_per_host", [3, 1])
@on_ranks(3)
def test_steps_in_a_different_order_are_named_on_every_rank(ranks_per_host: int) -> None:
    pretend_hosts(ranks_per_host)
    with shoal.init() as world:
        for name, (call, facts) in CASES.items():
            group = world.subgroup(range(world.size), name)
            world.barrier()
            check_named(call, group, facts)
            world.barrier()


@pytest.mark.parametrize(
    ("others", "odd", "facts", "n_ranks"), [("GD", "DG", FIRST_STEPS, 3), ("GDGD", "GGD", AHEAD, 6)]
)
@serving.with_a_server()
def test_servers_compare_the_steps_of_averagers(
    others: str, odd: str, facts: list[str], n_ranks: int
) -> None:
    with served_group(1, n_ranks // 3, timeout_s=300.0) as group:
        check_named(partial(average_in, others, odd, 4_000_003), group, facts)
