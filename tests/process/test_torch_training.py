"""torch's own DDP over shoal: ranks that die, torchrun, and SHOAL_WIRE."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from process.ranks import on_ranks, on_survivors, run_ranks
from process.stage import Stage, error_of, pretend_hosts
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook


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


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("shoal")
tensor = torch.full((4,), float(dist.get_rank()))
dist.all_reduce(tensor)
assert tensor.tolist() == [1.0] * 4, tensor
dist.barrier()
dist.destroy_process_group()

import numpy as np
from shoal.launch import init
with init() as group:
    data = np.ones(3)
    group.all_reduce(data)
    assert data.tolist() == [2.0] * 3, data
"""


def run_by_torchrun(path: Path) -> None:
    from torch.distributed.run import main

    main(["--standalone", "--nproc-per-node=2", str(path)])


def test_torchrun_jobs_need_no_import_of_shoal_or_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    run_ranks(run_by_torchrun, 1, path, deadline_s=200)


@on_ranks(2)
def test_shoal_wire_applies_to_sums_of_torch() -> None:
    pretend_hosts(1)
    os.environ["SHOAL_WIRE"] = "bf16"
    dist.init_process_group("shoal")
    large, small, whole = torch.full((16_384,), 257.0), torch.full((9,), 257.0), torch.ones(16_384)
    dist.all_reduce(large)
    dist.all_reduce(small)
    dist.broadcast(whole.mul_(257), 0)
    mean = torch.full((32_768,), 257.0)
    block = torch.empty(16_384)
    dist.reduce_scatter_single(block, mean, op=dist.ReduceOp.AVG) if hasattr(
        dist, "reduce_scatter_single"
    ) else dist.reduce_scatter_tensor(block, mean, op=dist.ReduceOp.AVG)
    dist.destroy_process_group()
    # The result of reduce_scatter does not travel: (256 + 257) / 2.
    found = [float(each[0]) for each in (large, small, whole, block)]
    assert found == [512, 514, 257, 256.5]
