"""torch's default group goes on without lost ranks, and with new ones.

`SHOAL_SOAK=1` runs the elastic example for a minute, as `make test-soak` does.
"""

import os
import re
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from process.examples import run_example
from process.ranks import on_ranks, on_survivors, run_ranks, run_survivors
from process.stage import Stage, die, error_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import shoal.torch
from shoal.errors import PeerLost, Unsupported, UsageError
from shoal.frontend.torch import grow

SECONDS, EVERY = (60, 4) if os.environ.get("SHOAL_SOAK") else (2, 1)


def test_training_goes_on_to_the_same_weights_everywhere_after_rank_0_is_killed() -> None:
    printed = run_example("survive.py", "--workers=3", "--kill=0", "--steps=30")
    went_on = re.findall(r"worker (\d) continues as rank (\d) of (\d): rank 0 ", printed)
    assert sorted(went_on) == [("1", "0", "2"), ("2", "1", "2")]
    ends = sorted(re.findall(r"worker (\d) ends with (loss [\d.]+, weights [-\d.]+)", printed))
    assert [worker for worker, _ in ends] == ["1", "2"]
    assert ends[0][1] == ends[1][1]


def test_a_job_whose_workers_are_killed_and_join_loses_no_step() -> None:
    options = f"--seconds={SECONDS}", f"--every={EVERY}", "--seed=1"
    printed = run_example("elastic.py", *options)
    events = re.search(r"(\d+) workers were killed, and (\d+) joined", printed)
    assert events is not None, printed
    assert min(map(int, events.groups())) > 0
    assert "was killed by SIGKILL" in printed
    found = re.search(r"loss after (\d+) steps: ([\d.]+), undisturbed: ([\d.]+)", printed)
    assert found is not None, printed
    assert int(found[1]) > 1
    assert float(found[2]) == pytest.approx(float(found[3]), rel=1e-3)


@on_survivors(3, 0, has_stage=True)
def test_the_default_group_and_new_groups_hold_exactly_the_survivors() -> None:
    with pytest.raises(UsageError, match="init_process_group first"):
        shoal.torch.shrink_group()
    dist.init_process_group("shoal")
    rank, size = dist.get_rank(), dist.get_world_size()
    old = dist.group.WORLD
    part = dist.new_group([0, 1])
    dist.barrier()
    assert shoal.torch.peer_lost() is None
    with pytest.raises(Unsupported, match="only the default group"):
        shoal.torch.shrink_group(group=part)
    Stage.from_environment().meet(rank, size, "ready", victim=0)
    with pytest.raises(PeerLost):
        dist.all_reduce(torch.ones(10))
    assert shoal.torch.peer_lost().rank == 0

    group = shoal.torch.shrink_group()
    assert group is dist.group.WORLD is not old
    assert shoal.torch.peer_lost() is None
    assert (dist.get_rank(), dist.get_world_size()) == (rank - 1, 2)
    data = torch.arange(7.0) * (rank + 1)
    dist.all_reduce(data)
    np.testing.assert_array_equal(data.numpy(), np.arange(7) * (2 + 3))
    pair = dist.new_group([0, 1])
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, rank, group=pair)
    again = shoal.torch.shrink_group()  # with nobody lost: the same ranks
    assert dist.get_process_group_ranks(again) == [0, 1]
    dist.barrier()
    dist.destroy_process_group()
    assert gathered == [1, 2]


def test_a_default_group_of_another_backend_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert shoal.torch.peer_lost() is None
        with pytest.raises(Unsupported, match="only shoal groups can shrink"):
            shoal.torch.shrink_group()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("how", ["plain", "hook"])
@on_survivors(3, 1, has_stage=True)
def test_ddp_names_a_lost_peer_and_the_process_survives(how: str) -> None:
    dist.init_process_group("shoal", timeout=timedelta(seconds=30))
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(20, 50), bucket_cap_mb=0.001)
    if how == "hook":
        wrapped.register_comm_hook(None, allreduce_hook)
    data = torch.ones(8, 20)
    wrapped(data).sum().backward()
    Stage.from_environment().meet(dist.get_rank(), 3, "trained", victim=1)
    begin = time.monotonic()
    error = None
    for _ in range(3):
        error = error or error_of(lambda: wrapped(data).sum().backward())
    assert "PeerLost: rank 1" in f"{type(error).__name__}: {error}"  # DDP wraps it or passes it on
    assert time.monotonic() - begin < 25  # and no deadline of 30 s


# The default group admits newcomers, and training goes on as in one process.


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


def trained_alone(n_steps: int) -> nn.Linear:
    """Return the model after the same steps in one process."""
    net, optimizer = net_and_optimizer(0)
    for step in range(n_steps):
        train(net, optimizer, step, (0, 1))
    return net


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


def member_or_newcomer(n_old: int, victim: int) -> None:
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
    dist.destroy_process_group()
    alone = trained_alone(8).state_dict()
    torch.testing.assert_close(job.net.state_dict(), alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("victim", [-1, 0])
def test_a_newcomer_trains_on_with_the_others_even_in_place_of_a_dead_rank(victim: int) -> None:
    with Stage() as stage:
        how: Any = {"env": stage.env, "deadline_s": 90}
        if victim < 0:
            run_ranks(member_or_newcomer, 4, 3, victim, **how)
        else:
            run_survivors(member_or_newcomer, 4, victim, 3, victim, **how)


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
