"""Averagers stepped in a different order on one rank: all ranks get an error naming both."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from process.ranks import on_ranks, run_ranks
from process.serving import ServerProcess, job_env, new_key, served_group
from process.stage import error_of, pretend_hosts

import shoal
from shoal.average import Averager
from shoal.errors import UsageError

ODD = 1  # the rank with a different order
SOON_S = 30.0  # waiting for a deadline would take minutes

Call = Callable[[shoal.Group], Exception | None]
Outcome = tuple[float, Exception | None]


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

# By name: the steps of most ranks, the steps of the odd rank, and the text of the error.
ORDERS = {"another order": ("GD", "DG", FIRST_STEPS), "a step ahead": ("GDGD", "GGD", AHEAD)}
CASES: dict[str, tuple[Call, list[str]]] = {
    "another order": (partial(average_in, "GD", "DG", 1000), FIRST_STEPS),
    "a step ahead": (partial(average_in, "GDGD", "GGD", 1 << 20), AHEAD),
    "weights in another order": (partial(begin_in, "weighted"), FIRST_STEPS),
    "absent arrays in another order": (partial(begin_in, "find_unused"), FIRST_STEPS),
    "a plain sum": (sum_beside_a_step, ["for averager 1, step 1, buffer 0"]),
}


def timed(call: Call, group: shoal.Group) -> Outcome:
    started = time.monotonic()
    error = call(group)
    return time.monotonic() - started, error


def check_named(outcome: Outcome, facts: list[str]) -> None:
    took_s, error = outcome
    assert isinstance(error, UsageError), error
    for words in facts:
        assert words in str(error), error
    assert took_s < SOON_S


@pytest.mark.parametrize("ranks_per_host", [3, 1])
@on_ranks(3)
def test_steps_in_a_different_order_are_named_on_every_rank(ranks_per_host: int) -> None:
    pretend_hosts(ranks_per_host)
    with shoal.init() as world:
        for name, (call, facts) in CASES.items():
            group = world.subgroup(range(world.size), name)
            world.barrier()
            check_named(timed(call, group), facts)
            world.barrier()


def disagree_beside_a_server(others: str, odd: str, ranks_per_host: int) -> Outcome:
    with served_group(1, ranks_per_host, timeout_s=300.0) as group:
        return timed(partial(average_in, others, odd, 4_000_003), group)


@pytest.mark.parametrize(("name", "ranks_per_host"), [("another order", 1), ("a step ahead", 2)])
def test_servers_compare_the_steps_of_averagers(
    tmp_path: Path, name: str, ranks_per_host: int
) -> None:
    others, odd, facts = ORDERS[name]
    key = new_key(tmp_path)
    with ServerProcess(key) as server:
        given, env = (others, odd, ranks_per_host), job_env(key, server.address)
        outcomes = run_ranks(disagree_beside_a_server, 3 * ranks_per_host, *given, env=env)
    for outcome in outcomes:
        check_named(outcome, facts)
