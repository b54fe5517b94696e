"""`DistributedDataParallel.report`: where the time of training steps went."""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from process.ddp_training import wrap
from process.shared_ranks import Case, SharedRanks, cases_in
from torch import nn


def case_a_report_covers_forward_and_backward_passes_and_all_ranks() -> None:
    layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    net = wrap(layers)
    for step in range(6):
        if step % 2:  # its gradients are added up, and not averaged
            with net.no_sync():
                net(torch.ones(4, 16)).sum().backward()
        net(torch.ones(4, 16)).sum().backward()
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
    if dist.get_rank() == 0:  # alone
        assert [one.rank for one in net.report(alone=True).ranks] == [0]


def case_a_report_of_a_communication_hook_is_refused() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    import shoal

    net = wrap(nn.Linear(16, 8))
    net.register_comm_hook(None, default_hooks.allreduce_hook)
    net(torch.ones(4, 16)).sum().backward()
    with pytest.raises(shoal.Unsupported, match=r"communication hooks.*torch\.profiler"):
        net.report()
    assert "backward_comm_time" not in net._get_ddp_logging_data()


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return self.used(data)


def case_a_gradient_that_never_came_is_named_in_the_report() -> None:
    net = wrap(Part())
    net(torch.ones(4, 16)).sum().backward()
    with pytest.raises(RuntimeError, match=r"idle\.weight"):
        net(torch.ones(4, 16))
    report = net.report(alone=True)
    assert report.missing == ("idle.weight", "idle.bias")
    assert "not ready on this rank: 'idle.weight', 'idle.bias'" in str(report)


@pytest.mark.parametrize("case", cases_in(globals()))
def test_report(case: Case, ranks: SharedRanks) -> None:
    ranks.run(case)
