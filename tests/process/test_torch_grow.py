"""torch's default group admits newcomers, and training goes on as in one process."""

import os
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from process.ranks import on_ranks, on_survivors, run_ranks, run_survivors
from process.stage import Stage, die, error_of
from torch import nn

import shoal.torch
from shoal.errors import UsageError
from shoal.frontend.torch import grow

TIMEOUT = timedelta(seconds=40)
N_ROWS = 12  # of all ranks


def net_and_optimizer(seed: int) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Linear(5, 3, dtype=torch.float64)
    return net, torch.optim.Adam(net.parameters(), lr=0.1)


def rows(step: int, rank: int, size: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(step)
    return torch.randn(N_ROWS, 5, dtype=torch.float64, generator=source)[rank::size]


def train(model: Any, optimizer: torch.optim.Optimizer, step: int, place: tuple[int, int]) -> None:
    optimizer.zero_grad()
    model(rows(step, *place)).square().mean().backward()
    optimizer.step()


def trained_alone(n_steps: int) -> list[list[float]]:
    """Return the weights after the same steps in one process."""
    net, optimizer = net_and_optimizer(0)
    for step in range(n_steps):
        train(net, optimizer, step, (0, 1))
    return [one.flatten().tolist() for one in net.parameters()]


class Job:
    """The model and optimizer of one rank, in the current group."""

    def __init__(self, seed: int) -> None:
        self.net, self.optimizer = net_and_optimizer(seed)
        self.model, self.step = None, 0

    def go_on(self) -> None:
        """Wrap the model or regroup it, and take the state of rank 0."""
        if self.model is None:
            self.model = shoal.torch.DistributedDataParallel(self.net)
        else:
            self.model.regroup()
        shoal.torch.sync_state(self.net, self.optimizer)
        step = torch.tensor(self.step)
        dist.broadcast(step, 0)
        self.step = int(step)

    def train(self, until: int) -> None:
        while self.step < until:
            place = dist.get_rank(), dist.get_world_size()
            train(self.model, self.optimizer, self.step, place)
            self.step += 1

    def end(self) -> list[list[float]]:
        dist.destroy_process_group()
        return [one.flatten().tolist() for one in self.net.parameters()]


def check_group(size: int) -> None:
    """Check that torch's functions of a default group work."""
    assert dist.get_world_size() == size
    data = torch.arange(5) * (dist.get_rank() + 1)
    dist.all_reduce(data)
    np.testing.assert_array_equal(data.numpy(), np.arange(5) * sum(range(1, size + 1)))
    ends = dist.new_group([0, size - 1])
    gloo = dist.new_group(backend="gloo")
    data = torch.tensor([dist.get_rank()])
    if dist.get_rank() in (0, size - 1):
        dist.all_reduce(data, group=ends)
        assert data.item() == size - 1
    dist.barrier(group=gloo)


def member_or_newcomer(n_old: int, victim: int) -> Any:
    """The first ranks form a group, where one may be killed; the last rank joins it."""
    stage, rank = Stage.from_environment(), int(os.environ["RANK"])
    job = Job(seed=rank)
    n_left = n_old - (victim >= 0)
    if rank < n_old:
        os.environ["WORLD_SIZE"] = str(n_old)
        with pytest.raises(UsageError, match="grow_group: there is no default group"):
            shoal.torch.grow_group()
        dist.init_process_group("shoal", timeout=TIMEOUT)
        job.go_on()
        job.train(4)
        before = dist.group.WORLD
        assert shoal.torch.grow_group() is before
        with pytest.raises(UsageError, match="default group already; a member calls grow_group"):
            shoal.torch.join_group("127.0.0.1:1")
        stage.store.set(f"address {rank}", shoal.torch.join_address().encode())
        if rank == victim:
            stage.cue("dies")
            die()
        while victim >= 0 and error_of(dist.all_reduce, torch.ones(1)) is None:
            pass  # until the victim is lost
        while dist.get_world_size() != n_left + 1 or shoal.torch.peer_lost() is not None:
            shoal.torch.grow_group()
    else:
        known = [stage.store.get(f"address {one}", 40).decode() for one in range(n_old)]
        shoal.torch.join_group(",".join(known), timeout=TIMEOUT)
    job.go_on()
    assert job.step == 4
    check_group(n_left + 1)
    job.train(8)
    return job.end()


@pytest.mark.parametrize("victim", [-1, 0])
def test_a_newcomer_trains_on_with_the_others_even_in_place_of_a_dead_rank(victim: int) -> None:
    with Stage() as stage:
        how: Any = {"env": stage.env, "deadline_s": 90}
        if victim < 0:
            found = run_ranks(member_or_newcomer, 4, 3, victim, **how)
        else:
            found = run_survivors(member_or_newcomer, 4, victim, 3, victim, **how)
    alone = trained_alone(8)
    for weights in found:
        for ours, wanted in zip(weights, alone, strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=1e-9, atol=1e-12)


@on_ranks(1)
def test_a_newcomer_that_is_never_admitted_raises() -> None:
    with pytest.raises(UsageError, match="give the address of a living rank, or set SHOAL_JOIN"):
        shoal.torch.join_group()
    with pytest.raises(TimeoutError, match=r"let this process in within 1 s, at 127\.0\.0\.1:1"):
        shoal.torch.join_group("127.0.0.1:1", timeout=timedelta(seconds=1))
    assert not dist.is_initialized()


@on_survivors(3, 2, deadline_s=80)
def test_grow_group_can_be_called_again_after_an_interrupt() -> None:
    """Rank 2 dies; rank 1 is interrupted just before it makes the next group torch's."""
    dist.init_process_group("shoal", timeout=TIMEOUT)
    if dist.get_rank() == 2:
        die()
    store_of = grow._store_of

    def interrupted(_group: Any) -> Any:
        grow._store_of = store_of
        raise KeyboardInterrupt

    if dist.get_rank() == 1:
        grow._store_of = interrupted
        with pytest.raises(KeyboardInterrupt):
            shoal.torch.grow_group()
    shoal.torch.grow_group()
    data = torch.ones(3)
    dist.all_reduce(data)
    dist.destroy_process_group()
    assert data.sum() == 6.0
