"""Ranks started by torch.multiprocessing, and two frameworks in one process."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from process.examples import run_script
from process.ranks import on_ranks, start_process

import shoal
from shoal.errors import UsageError

SPAWNED = str(Path(__file__).with_name("spawned.py"))


def run_spawned(*given: str) -> str:
    """Return the program's output; it ends long before its calls time out."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with start_process(run_script, SPAWNED, given, needs="torch", number=0, env=env) as process:
        (outcome,) = process.wait(200)
    assert not outcome.died, str(outcome)
    assert not outcome.error, str(outcome)
    return outcome.output


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_spawned_ranks_meet_by_each_init_method(method: str) -> None:
    assert run_spawned(method, "meet").endswith("ended well\n")


@pytest.mark.parametrize("action", ["raise", "kill"])
def test_a_failed_rank_ends_the_others_and_the_parent_gets_an_error(action: str) -> None:
    printed = run_spawned("fork", action)
    # The parent raises for the rank that ends first: rank 1, or one that lost it.
    reasons = ["what rank 1 lacks", "process 1 terminated with signal SIGKILL", "PeerLost: rank 1"]
    assert re.search("^Process(Raised|Exited)Exception", printed, re.MULTILINE), printed
    assert any(reason in printed for reason in reasons), printed


@pytest.mark.parametrize("torch_first", [False, True])
@on_ranks(2)
def test_a_numpy_group_formed_first_works_beside_a_torch_group(torch_first: bool) -> None:
    if torch_first:
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            with pytest.raises(UsageError, match=r"call shoal.init\(\) before init_process_group"):
                shoal.init(timeout_s=20)
        dist.barrier()
        dist.destroy_process_group()
        return
    with shoal.init(timeout_s=60) as group:
        dist.init_process_group("gloo")
        for step in range(5):
            array, tensor = np.full(1000, group.rank + step), torch.full((1000,), 1.0 + step)
            group.all_reduce(array)
            dist.all_reduce(tensor)
            assert array.tolist() == [1 + 2 * step] * 1000
            assert tensor.tolist() == [2.0 + 2 * step] * 1000
        dist.destroy_process_group()
