"""Averagers stepped in a different order on one rank: all ranks get an error naming both."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from process.ranks import run_ranks
from process.serving import ServerProcess, await_servers, job_env, new_key
from process.shared_ranks import SharedRanks
from process.stage import error_of, pretend_hosts
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import shoal
from shoal.average import Averager
from shoal.errors import UsageError

ODD = 1  # the rank with a different order
SOON_S = 30.0  # waiting for a deadline would take minutes

# By name: the steps of most ranks, the steps of the odd rank, and the text of the error.
ORDERS: dict[str, tuple[str, str, list[str]]] = {
    "another order": ("GD", "DG", ["averager 1, step 1, buffer", "averager 2, step 1, buffer"]),
    "a step ahead": ("GDGD", "GGD", ["averager 2, step 1, buffer", "averager 1, step 2, buffer"]),
}


def step(averager: Averager) -> None:
    arrays = averager.begin()
    for name in arrays:
        averager.ready(name)
    averager.wait()


def average_in(order: str, group: shoal.Group, n_elems: int) -> tuple[float, Exception | None]:
    averagers = {
        model: Averager(
            group, {f"{model}.{name}": ((n_elems,), "float32") for name in ("first", "last")}
        )
        for model in "GD"
    }
    if getattr(group, "pool", None) is not None:
        await_servers(group, 1)
    # Other ranks may leave a barrier, and make mismatched calls, before the last rank leaves it.
    error = error_of(group.barrier)
    started = time.monotonic()
    error = error or next(filter(None, (error_of(step, averagers[m]) for m in order)), None)
    return time.monotonic() - started, error or error_of(group.barrier)


def average_in_two_orders(name: str, ranks_per_host: int, n_elems: int) -> Any:
    pretend_hosts(ranks_per_host)
    with shoal.init() as group:
        return average_in(ORDERS[name][group.rank == ODD], group, n_elems)


def check_named(outcome: tuple[float, Exception | None], facts: list[str]) -> None:
    took_s, error = outcome
    assert isinstance(error, UsageError), error
    for words in (f"rank {ODD} (", *facts, "averager 1 averages 'G.first' to 'G.last'", "step"):
        assert words in str(error), error
    assert "averager 2 averages 'D.first' to 'D.last'" in str(error)
    assert took_s < SOON_S


@pytest.mark.parametrize(
    ("name", "ranks_per_host", "n_elems"),
    [("another order", 3, 5), ("a step ahead", 3, 1 << 20), ("another order", 1, 1000)],
)
def test_averager_steps_in_a_different_order_are_named_on_every_rank(
    name: str, ranks_per_host: int, n_elems: int
) -> None:
    for outcome in run_ranks(average_in_two_orders, 3, name, ranks_per_host, n_elems):
        check_named(outcome, ORDERS[name][2])


@pytest.mark.parametrize(("name", "ranks_per_host"), [("another order", 1), ("a step ahead", 2)])
def test_servers_compare_the_steps_of_averagers(
    tmp_path: Path, name: str, ranks_per_host: int
) -> None:
    key = new_key(tmp_path)
    with ServerProcess(key) as server:
        env = job_env(key, server.address)
        size = 3 * ranks_per_host
        outcomes = run_ranks(average_in_two_orders, size, name, ranks_per_host, 4_000_003, env=env)
    for outcome in outcomes:
        check_named(outcome, ORDERS[name][2])


def begin_in_two_orders(option: str) -> tuple[float, Exception | None]:
    """Make steps whose first calls are not for buffers; the averagers' buffer counts differ.

    Ranks weigh arrays before sending a buffer, and leave all arrays out where allowed.
    """
    with shoal.init() as group:
        averagers = {
            model: Averager(
                *(group, {f"{model}.{name}": ((n, 100), "float32") for name in ("first", "last")}),
                fusion_bytes=2000,
                **{option: True},
            )
            for model, n in {"G": 20, "D": 5}.items()
        }
        # Other ranks may be in mismatched calls before the last rank has left it.
        left = error_of(group.barrier)
        started = time.monotonic()

        def run(averager: Averager) -> None:
            arrays = averager.begin(1.0 if option == "weighted" else None)
            for name in arrays if option == "weighted" else ():
                averager.ready(name)
            averager.wait()

        order = "DG" if group.rank == ODD else "GD"
        error = next(filter(None, (error_of(run, averagers[model]) for model in order)), None)
        return time.monotonic() - started, left or error


@pytest.mark.parametrize("option", ["weighted", "find_unused"])
def test_small_sums_of_averagers_in_a_different_order_are_named_on_every_rank(option: str) -> None:
    for outcome in run_ranks(begin_in_two_orders, 3, option):
        check_named(outcome, ["averager 1, step 1, buffer", "averager 2, step 1, buffer"])


def sum_beside_a_step() -> tuple[float, Exception | None]:
    """One rank sums an array as long as the buffer in which the others average."""
    with shoal.init() as group:
        averager = Averager(group, {"G.first": ((1008,), "float32")})
        averager.begin()
        length = averager.layout.buffers[0].n_elems
        left = error_of(group.barrier)  # other ranks may be past it, in mismatched calls
        started = time.monotonic()
        if left is not None:
            call = left
        elif group.rank == ODD:
            number = averager._departures.reserve()[0]
            call = error_of(group.all_reduce, np.ones(length, np.float32), "avg", number=number)
        else:
            averager.ready("G.first")
            call = error_of(averager.wait)
        return time.monotonic() - started, call or error_of(group.barrier)


def test_a_plain_sum_does_not_match_a_buffer_of_an_averager() -> None:
    for took_s, error in run_ranks(sum_beside_a_step, 3):
        assert isinstance(error, UsageError), error
        assert "for averager 1, step 1, buffer 0" in str(error)
        assert took_s < SOON_S


def train_two_models(hook: bool) -> Exception | None:
    """Train two models of one size, whose backward passes have a different order on one rank."""
    import shoal.torch

    wrapped = {name: shoal.torch.DistributedDataParallel(torch.nn.Linear(40, 30)) for name in "GD"}
    if hook:
        for model in wrapped.values():
            model.register_comm_hook(None, bf16_compress_hook)
    order = "DG" if dist.get_rank() == ODD else "GD"

    def train() -> None:
        for name in order:
            wrapped[name](torch.ones(4, 40)).sum().backward()

    left = error_of(dist.barrier)  # others may be past it, in mismatched calls
    return left or error_of(train) or error_of(dist.barrier)


@pytest.mark.parametrize("hook", [False, True])
def test_backward_passes_of_two_models_in_a_different_order_are_named_on_every_rank(
    hook: bool, ranks: SharedRanks
) -> None:
    for error in ranks.run(train_two_models, hook):
        for averager in (3, 4) if hook else (1, 2):
            assert f"for averager {averager}, step 1, buffer 0" in str(error)
            assert f"averager {averager} averages 'weight' to 'bias', and is in" in str(error)
