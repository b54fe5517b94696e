"""torch's default group goes on without lost ranks: the example, and the functions it uses."""

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from process.examples import run_example
from process.ranks import on_survivors
from process.stage import Stage

import shoal.torch
from shoal.errors import PeerLost, Unsupported, UsageError


def test_training_goes_on_to_the_same_weights_everywhere_after_rank_0_is_killed() -> None:
    printed = run_example("survive.py", "--workers=3", "--kill=0", "--steps=30")
    went_on = re.findall(r"worker (\d) continues as rank (\d) of (\d): rank 0 ", printed)
    assert sorted(went_on) == [("1", "0", "2"), ("2", "1", "2")]
    ends = sorted(re.findall(r"worker (\d) ends with (loss [\d.]+, weights [-\d.]+)", printed))
    assert [worker for worker, _ in ends] == ["1", "2"]
    assert ends[0][1] == ends[1][1]


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
