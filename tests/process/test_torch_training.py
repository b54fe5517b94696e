"""Training with torch's own layers over shoal gives what it gives over Gloo."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from process.ranks import run_ranks, start_ranks
from process.stage import Stage, leave_at_once

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    Group = dist.ProcessGroup

N_STEPS = 5


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 3))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's own data."""
    source = torch.Generator().manual_seed(dist.get_rank())
    return [
        (torch.randn(8, 20, generator=source), torch.randn(8, 3, generator=source))
        for _ in range(N_STEPS)
    ]


def train(wrapped: nn.Module) -> list[float]:
    """The losses of a few steps, and last the sum of all parameters."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for data, target in batches():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(data), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [*losses, sum(total_of(parameter) for parameter in wrapped.parameters())]


def total_of(parameter: torch.Tensor) -> float:
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return float(whole.detach().double().sum())


def start(backend: str = "shoal") -> None:
    dist.init_process_group(backend, timeout=timedelta(seconds=30))


# ---- DDP ----


# So small that several buckets are in flight.
SMALL_MB = 0.001


def ddp(
    group: Group, bucket_cap_mb: float = SMALL_MB, **options: Any
) -> nn.parallel.DistributedDataParallel:
    net = model(dist.get_rank())
    options = {"process_group": group, "bucket_cap_mb": bucket_cap_mb, **options}
    return nn.parallel.DistributedDataParallel(net, **options)


def train_with_ddp(beside_gloo: bool = True) -> dict[str, list[list[float]]]:
    """By variant, the losses over shoal and over Gloo, beside it in the same processes."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    start()
    groups = [dist.group.WORLD]
    if beside_gloo:
        groups.append(dist.new_group(backend="gloo"))

    def with_hook(group: Group) -> nn.Module:
        wrapped = ddp(group)
        wrapped.register_comm_hook(group, default_hooks.allreduce_hook)
        return wrapped

    def with_power_sgd(group: Group) -> nn.Module:
        torch.manual_seed(3)
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=2, start_powerSGD_iter=2
        )
        # One bucket: the hook calls collectives in callbacks, whose order among those of other
        # buckets differs from rank to rank on a CPU; over Gloo that hangs.
        wrapped = ddp(group, bucket_cap_mb=25)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped

    variants: dict[str, Callable[[Any], nn.Module]] = {
        "plain": ddp,
        "hook": with_hook,
        "power_sgd": with_power_sgd,
        "unused": lambda group: ddp(group, find_unused_parameters=True),
        "views": lambda group: ddp(group, gradient_as_bucket_view=True),
        "static": lambda group: ddp(group, static_graph=True),
        "one_bucket": lambda group: ddp(group, bucket_cap_mb=25, broadcast_buffers=False),
    }
    losses = {name: [train(wrap(group)) for group in groups] for name, wrap in variants.items()}
    dist.destroy_process_group()
    return losses


@pytest.fixture(scope="module")
def losses_of_two() -> list[dict[str, list[list[float]]]]:
    """What two ranks return."""
    return run_ranks(train_with_ddp, 2)


def test_ddp_trains_as_over_gloo(losses_of_two: list[dict[str, list[list[float]]]]) -> None:
    for losses in losses_of_two:
        for name, (ours, theirs) in losses.items():
            assert ours == pytest.approx(theirs, rel=1e-5), name


def test_ddp_over_three_ranks_trains_as_over_gloo() -> None:
    for losses in run_ranks(train_with_ddp, 3):
        for name, (ours, theirs) in losses.items():
            assert ours == pytest.approx(theirs, rel=1e-4), name


def test_ddp_trains_the_same_when_torch_debugs_it(
    losses_of_two: list[dict[str, list[list[float]]]],
) -> None:
    # Without Gloo: torch 2.13 itself dies of SIGSEGV when DDP logs a Gloo group in this mode.
    debugged = run_ranks(train_with_ddp, 2, False, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    for losses, expected in zip(debugged, losses_of_two, strict=True):
        for name, (ours,) in losses.items():
            assert ours == pytest.approx(expected[name][0], rel=1e-6), name


# ---- FSDP2 and DTensor ----


def train_with_fsdp(backend: str) -> list[float]:
    """The losses over that backend."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    start(backend)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3))
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=mesh)
    losses = train(net)
    dist.destroy_process_group()
    return losses


def train_with_fsdp_over_gloo() -> list[float]:
    leave_at_once()
    return train_with_fsdp("gloo")


def test_fsdp2_trains_as_over_gloo() -> None:
    theirs = run_ranks(train_with_fsdp_over_gloo, 2)
    for ours, expected in zip(run_ranks(train_with_fsdp, 2, "shoal"), theirs, strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)


# ---- life and death ----


def lose_a_peer(how: str) -> list[str]:
    """What the survivors' backward says, when rank 1 dies in the middle of training."""
    start()
    wrapped = ddp(dist.group.WORLD)
    if how == "hook":
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        wrapped.register_comm_hook(None, default_hooks.allreduce_hook)
    data, target = batches()[0]
    nn.functional.mse_loss(wrapped(data), target).backward()
    Stage.from_environment().meet(dist.get_rank(), 3, "trained")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        for _ in range(3):
            nn.functional.mse_loss(wrapped(data), target).backward()
    except Exception as error:  # noqa: BLE001 - whichever: it is what is tested
        return [type(error).__name__, str(error), str(time.monotonic() - begin)]
    return ["nothing", "", "0"]


@pytest.mark.parametrize("how", ["plain", "hook"])
def test_a_lost_peer_is_named_by_ddp_and_the_process_survives(how: str) -> None:
    with Stage() as stage, start_ranks(lose_a_peer, 3, how, env=stage.env) as ranks:
        outcomes = ranks.wait(60)
    assert outcomes[1].died == "was killed by SIGKILL"
    for outcome in (outcomes[0], outcomes[2]):
        assert not outcome.died, str(outcome)
        assert outcome.error is None, str(outcome)
        kind, message, took_s = outcome.value  # DDP wraps it, or hands it on
        assert "PeerLost: rank 1" in f"{kind}: {message}", str(outcome)
        assert float(took_s) < 25  # and no deadline of 30 s


def start_again() -> list[float]:
    values, stage = [], Stage.from_environment()
    for attempt in range(3):
        start()
        tensor = torch.ones(5)
        dist.all_reduce(tensor)
        values.append(tensor[0].item())
        dist.destroy_process_group()
        if os.environ["RANK"] == "0":
            stage.cue(f"the store of attempt {attempt} is gone")
        stage.await_cue(f"the store of attempt {attempt} is gone")  # NOT into its last moments
    return values


def test_a_process_can_destroy_its_groups_and_start_again() -> None:
    with Stage() as stage:
        assert run_ranks(start_again, 2, env=stage.env) == [[2.0] * 3] * 2


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("shoal")
tensor = torch.full((4,), float(dist.get_rank()))
dist.all_reduce(tensor)
assert tensor.tolist() == [1.0] * 4, tensor
dist.destroy_process_group()
"""


def test_torchrun_needs_no_import_of_shoal() -> None:
    run_with_torchrun(SCRIPT)


MEETING = """
import numpy as np
from shoal.launch import init
with init() as group:
    data = np.ones(3)
    group.all_reduce(data)
    assert data.tolist() == [2.0] * 3, data
"""


def test_a_group_without_torch_meets_at_the_store_of_torchrun() -> None:
    run_with_torchrun(MEETING)


def run_with_torchrun(script: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(script)
        run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = subprocess.run(
            [*run, str(path)], capture_output=True, text=True, timeout=100, check=False
        )
    assert done.returncode == 0, done.stderr
