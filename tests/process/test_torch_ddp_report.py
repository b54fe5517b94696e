"""`DistributedDataParallel.report`: where the time of training steps went."""

from __future__ import annotations

import importlib.util
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from process.ranks import run_ranks

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from process.ddp_training import start, wrap
from torch import nn


def train(net: Any, n_steps: int, optimizer: Any = None) -> None:
    for step in range(n_steps):
        if step % 2 and optimizer is None:  # its gradients are added up, and not averaged
            with net.no_sync():
                net(torch.ones(4, 16)).sum().backward()
        net(torch.ones(4, 16)).sum().backward()
        if optimizer is not None:
            optimizer.step()


def report_on_training() -> None:
    import shoal

    start()
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    net = wrap(layers)
    train(net, 6)
    report = net.report()
    assert [step.number for step in report.steps] == [0, 1, 2, 3, 4]
    for times in report.times:
        assert 0 < times.forward < times.begin < times.backward < times.first < times.wait
        assert times.wait <= times.sent < times.end
    for step in report.steps:
        assert step.forward > 0
        assert step.backward > 0
        assert step.total == pytest.approx(step.forward + step.backward + step.exposed + step.other)
    assert len(report.ranks) == 2
    logged = net._get_ddp_logging_data()
    assert logged["forward_compute_time"] == pytest.approx(report.steps[-1].forward * 1e3, abs=1)
    mean = sum(step.backward for step in report.steps) / len(report.steps)
    assert logged["avg_backward_compute_time"] == pytest.approx(mean * 1e3, abs=1)
    assert logged["backward_comm_time"] >= logged["backward_compute_comm_overlap_time"] > 0
    assert {name for buffer in report.buffers for name in buffer.arrays} <= {
        name for name, _ in layers.named_parameters()
    }
    if dist.get_rank() == 0:  # alone
        assert net.report(alone=True).ranks == ()

    late = wrap(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)), overlap_forward=True)
    train(late, 4, late.overlap(torch.optim.SGD(late.parameters(), lr=0.1)))
    report = late.report()
    for before, times in zip(report.times, report.times[1:], strict=False):
        assert times.forward < before.end < times.begin  # it is waited for in the next pass
    assert min(min(step[1:7]) for step in report.steps) >= 0
    late.synchronize()

    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    net.register_comm_hook(None, allreduce_hook)
    with pytest.raises(shoal.Unsupported, match="communication hook"):
        net.report()
    dist.destroy_process_group()


def test_a_report_tells_of_forward_and_backward_passes_and_of_all_ranks() -> None:
    run_ranks(report_on_training, 2)


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.used(data)


def leave_a_gradient_out(folder: str) -> None:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/rank_"
    start()
    net = wrap(Part())
    net(torch.ones(4, 16)).sum().backward()
    with pytest.raises(RuntimeError, match=r"idle\.weight"):
        net(torch.ones(4, 16))
    report = net.report(alone=True)
    assert report.missing == ("idle.weight", "idle.bias")
    assert "not ready on this rank: 'idle.weight', 'idle.bias'" in str(report)
    dist.destroy_process_group()


def test_a_gradient_that_never_came_is_named_in_the_report_and_in_the_dump(tmp_path: Path) -> None:
    run_ranks(leave_a_gradient_out, 2, str(tmp_path))
    for rank in range(2):
        dump = pickle.loads((tmp_path / f"rank_{rank}").read_bytes())
        assert dump["never_ready"] == ["idle.weight", "idle.bias"]
