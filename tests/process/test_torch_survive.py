"""torch's default group goes on without lost ranks: the examples, and what they use.

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
from process.ranks import on_survivors
from process.stage import Stage, error_of
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import shoal.torch
from shoal.errors import PeerLost, Unsupported, UsageError

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
