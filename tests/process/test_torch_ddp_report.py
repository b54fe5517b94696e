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

    dist.destroy_process_group()


def test_a_report_tells_of_forward_and_backward_passes_and_of_all_ranks() -> None:
    run_ranks(report_on_training, 2)


def check_hooked(report: Any, names: set[str]) -> None:
    assert [step.number for step in report.steps] == [0, 1, 2]
    assert [one.rank for one in report.ranks] == [0, 1]
    assert report.n_compared == 2
    for step in report.steps:
        assert step.total == pytest.approx(step.forward + step.backward + step.exposed + step.other)
        assert step.exposed > 0
        assert min(step[1:7]) >= 0
    for times in report.times:
        for number in range(len(times.posted)):
            assert times.full[number] <= times.posted[number] < times.done[number] <= times.end
            since, until = times.waits[number]
            # What has come before the hook returns is its own wait.
            in_hook = (since, until) == (times.posted[number], times.done[number])
            assert since < until <= times.end
            assert in_hook or times.sent <= since
    assert {name for buffer in report.buffers for name in buffer.arrays} == names
    assert "not known" not in str(report)


def report_on_hooks(folder: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    start()
    rank = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    hooks = [(None, default_hooks.allreduce_hook), (rank, powerSGD_hook.powerSGD_hook)]
    for state, hook in hooks:
        net = wrap(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8)))
        net.register_comm_hook(state, hook)
        for _ in range(4):
            net(torch.ones(4, 16)).sum().backward()
        report = net.report()
        check_hooked(report, {"1.bias", "1.weight", "0.bias", "0.weight"})
        assert net._get_ddp_logging_data()["backward_comm_time"] > 0
        report.flight_record(f"{folder}/rank_")
        report.chrome_trace(f"{folder}/trace{dist.get_rank()}.json")
        net(torch.ones(4, 16))
        assert net.report(alone=True).missing == ("0.weight", "0.bias", "1.weight", "1.bias")
    dist.destroy_process_group()


def test_a_report_tells_of_buckets_that_a_hook_averages(tmp_path: Path) -> None:
    run_ranks(report_on_hooks, 2, str(tmp_path))
    for rank in range(2):
        dump = pickle.loads((tmp_path / f"rank_{rank}").read_bytes())
        assert {entry["state"] for entry in dump["entries"]} == {"completed"}


def report_over_another_backend() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    from shoal.frontend.torch.ddp.buckets import HookedBuckets
    from shoal.frontend.torch.ddp.gradients import Gradients

    start()
    gloo: Any = dist.new_group(backend="gloo")
    parameters = list(nn.Linear(16, 8).parameters())
    gradients = Gradients(parameters, ["weight", "bias"], as_views=False)
    buckets = HookedBuckets(gradients, gloo, 64, allreduce_hook, gloo)
    for _ in range(4):
        buckets.begin()
        buckets.reserve()
        for index, parameter in enumerate(gradients.parameters):
            parameter.grad = torch.full_like(parameter, dist.get_rank())
            buckets.count(index)
        buckets.end(unused=False)
    assert {value.item() for p in gradients.parameters for value in p.grad.unique()} == {0.5}
    check_hooked(buckets.report(alone=False), {"weight", "bias"})
    dist.destroy_process_group()


def test_a_report_compares_ranks_over_a_group_that_is_not_shoals() -> None:
    run_ranks(report_over_another_backend, 2)


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
