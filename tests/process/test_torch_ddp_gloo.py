"""shoal's DistributedDataParallel beside torch's over Gloo, with hooks and autocast."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from process.ddp_training import OneOf, assert_same_bits, inputs, mine, wrap
from process.shared_ranks import Case, SharedRanks, cases_in
from torch import nn


def small(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 40), nn.Linear(40, 3)
    )


def train_beside_gloo(ours: Any, theirs: Any, amp: bool = False) -> None:
    """Both have the same bits after every step: of two ranks' sums there is only one order."""
    results = []
    for net in (ours, theirs):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(net.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=amp)
        seen = []
        for number in range(4):
            data, target = inputs(number, torch.float32)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = nn.functional.mse_loss(net(mine(data)), mine(target))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            seen.append([loss.detach()])
        results.append([*seen, [v.clone() for v in net.state_dict().values()]])
    assert_same_bits(*results)


def case_losses_and_states_have_the_bits_of_torchs_wrapper_over_gloo() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    gloo = dist.new_group(backend="gloo")
    size = {"bucket_cap_mb": 0.001}

    def both() -> Iterator[Any]:
        yield wrap(small(dist.get_rank()), **size)
        net = small(dist.get_rank())
        yield nn.parallel.DistributedDataParallel(net, process_group=gloo, **size)

    train_beside_gloo(*both())
    train_beside_gloo(*both(), amp=True)
    ours, theirs = both()
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        ours, theirs = both()
        ours.register_comm_hook(dist.group.WORLD, hook)
        theirs.register_comm_hook(gloo, hook)
        train_beside_gloo(ours, theirs)
    with pytest.raises(RuntimeError, match="only be called once"):
        ours.register_comm_hook(None, hook)
    # Over Gloo buckets would hang, since the calls of their callbacks come in any order.
    for net in (wrap(small(dist.get_rank()), **size), wrap(small(dist.get_rank()))):
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
        )
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        data, target = inputs(0, torch.float32)
        for _ in range(4):
            net.zero_grad()
            nn.functional.mse_loss(net(mine(data)), mine(target)).backward()
        assert state.iter == 4
        everywhere = [torch.empty_like(p.grad) for p in net.parameters() for _ in range(2)]
        for index, parameter in enumerate(net.parameters()):
            pair = everywhere[2 * index : 2 * index + 2]
            dist.all_gather(pair, parameter.grad)
            assert torch.equal(*pair)


def case_torchs_bf16_hook_runs_without_a_gpu() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    net = OneOf(torch.ones(3))
    wrapped = wrap(net)
    wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
    wrapped(1.0 + 2 * dist.get_rank()).backward()
    assert torch.equal(net.parts[0].grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("case", cases_in(globals()))
def test_beside_gloo(case: Case, ranks: SharedRanks) -> None:
    ranks.run(case)
