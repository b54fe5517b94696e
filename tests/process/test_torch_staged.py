"""The torch front end works through host memory as on the CPU, over real ranks too."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from contract import test_frontend_torch
from process.ranks import start_ranks
from process.shared_ranks import Case, SharedRanks, cases_in
from process.stage import Stage, error_of
from process.test_torch_layers import ddp, train

SIZE = 3
# Checks of a call that waits at once: here its Work waits.
NOT_SO = "futures_hold_the_list_of_tensors"


def stage() -> None:
    from process import staged

    staged.DEVICE = staged.stage_everything()  # type: ignore[attr-defined]


def n_copies() -> int:
    from process import staged

    return staged.DEVICE.n_copies  # type: ignore[attr-defined, no-any-return]


@pytest.fixture(scope="module")
def staged_ranks() -> Iterator[SharedRanks]:
    with SharedRanks(SIZE) as ranks:
        ranks.run(stage)
        yield ranks
        assert min(ranks.run(n_copies)) > 0


@pytest.mark.parametrize(
    "case", [one for one in cases_in(vars(test_frontend_torch)) if one.id != NOT_SO]
)
def test_a_check_of_the_front_end_passes(case: Case, staged_ranks: SharedRanks) -> None:
    staged_ranks.run(test_frontend_torch.in_rank, case.__name__)


def train_staged() -> None:
    from process.staged import stage_everything
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    expected = train(ddp(process_group=dist.new_group(backend="gloo")), n_steps=10)
    device = stage_everything(piece_bytes=256)
    wrapped = ddp()
    wrapped.register_comm_hook(dist.group.WORLD, default_hooks.allreduce_hook)
    torch.testing.assert_close(train(ddp(), n_steps=10), expected)
    torch.testing.assert_close(train(wrapped, n_steps=10), expected)
    assert device.n_copies > 100


def test_ddp_trains_as_over_gloo() -> None:
    with SharedRanks(SIZE) as ranks:
        ranks.run(train_staged)


def reduce_until_a_rank_dies() -> tuple[str, bool, list[str]]:
    """Return the error, True if no work was left to post, and the error that torch sees."""
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
    errors = [error_of(work.wait) for work in works]
    first = next((at for at, error in enumerate(errors) if error), 3)
    assert all(errors[first:]), "a call went well after one that did not"
    lost = shoal.torch.peer_lost()
    dist.destroy_process_group()
    left = [thread.name for thread in threading.enumerate() if "staging" in thread.name]
    return type(errors[-1]).__name__, lost is not None and lost.rank == 1, left


def test_a_rank_that_dies_in_mid_call_leaves_no_work_running_on_the_others() -> None:
    with Stage() as stage, start_ranks(reduce_until_a_rank_dies, SIZE, env=stage.env) as ranks:
        outcomes = ranks.wait()
    assert outcomes[1].died
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.value == ("PeerLost", True, []), str(outcome)
