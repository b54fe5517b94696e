"""What the torch front end does on the CPU it does by way of host memory, over real ranks too."""

from __future__ import annotations

import importlib.util
import os
import signal
from datetime import timedelta
from typing import Any

import pytest
from contract import (
    test_frontend_torch,
    test_frontend_torch_folds,
    test_frontend_torch_moves,
)
from contract.torch_checks import assert_passed, checks_in, raised, run_checks
from process.ranks import run_ranks, start_ranks
from process.stage import Stage

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from process.test_torch_training import ddp, start, train

SIZE = 3
FILES = (test_frontend_torch, test_frontend_torch_folds, test_frontend_torch_moves)
NOT_SO = {
    "futures_hold_the_list_of_tensors",  # of a call that waits: here it waits in its Work
    "functional_collectives",  # a second to load torch's compiler, for what others call too
}
CHECKS = {
    name: check
    for file in FILES
    for name, check in checks_in(vars(file)).items()
    if name not in NOT_SO
}


def run_staged() -> dict[str, str]:
    from process.staged import stage_everything

    device = stage_everything()
    failures = run_checks(CHECKS)
    assert device.n_copies > 1000
    return failures


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    return run_ranks(run_staged, SIZE)


@pytest.mark.parametrize("check", CHECKS)
def test_a_check_of_the_front_end_passes(check: str, failures: list[dict[str, str]]) -> None:
    assert_passed(failures, check)


def train_staged() -> list[list[float]]:
    from process.staged import stage_everything
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    start()
    expected = train(ddp(dist.new_group(backend="gloo")))
    device = stage_everything(piece_bytes=256)
    plain = train(ddp(dist.group.WORLD))  # type: ignore[arg-type]
    wrapped = ddp(dist.group.WORLD)  # type: ignore[arg-type]
    wrapped.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    hooked = train(wrapped)
    assert device.n_copies > 100
    dist.destroy_process_group()
    return [expected, plain, hooked]


def test_ddp_trains_as_over_gloo() -> None:
    for expected, *others in run_ranks(train_staged, SIZE):
        for losses in others:
            assert losses == pytest.approx(expected, rel=1e-5)


def reduce_until_a_rank_dies() -> tuple[str, bool, list[str]]:
    """The error; whether nothing was left to post; and what torch is told of the group."""
    import threading

    from process.staged import stage_everything

    import shoal.torch

    stage_everything()
    dist.init_process_group("shoal", timeout=timedelta(seconds=30))
    tensor = torch.ones(1 << 20)
    dist.all_reduce(tensor)
    Stage.from_environment().meet(dist.get_rank(), SIZE, "reduced")
    if dist.get_rank() == 1:
        dist.all_reduce(tensor, async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for _ in range(3)]
    errors = [raised(work.wait) for work in works]
    first = next((at for at, error in enumerate(errors) if error), 3)
    assert all(errors[first:]), "a call went well after one that did not"
    lost = shoal.torch.peer_lost()
    dist.destroy_process_group()
    left = [thread.name for thread in threading.enumerate() if "staging" in thread.name]
    return type(errors[-1]).__name__, lost is not None and lost.rank == 1, left


def test_a_rank_that_dies_in_mid_call_leaves_nothing_running_on_the_others() -> None:
    with Stage() as stage, start_ranks(reduce_until_a_rank_dies, SIZE, env=stage.env) as ranks:
        outcomes = ranks.wait()
    assert outcomes[1].died
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value == ("PeerLost", True, []), str(outcome)
