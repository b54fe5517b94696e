"""A model with overlap that is copied, pickled, wrapped anew or left by its wrapper."""

from __future__ import annotations

import copy
import gc
import importlib.util
import io
import pickle
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from process.ranks import run_ranks

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch
import torch.distributed as dist
from torch import nn


def wrap(module: nn.Module, **options: Any) -> Any:
    import shoal.torch

    return shoal.torch.DistributedDataParallel(module, **options)


def batch() -> torch.Tensor:
    return torch.full((2, 4), float(1 + dist.get_rank()))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(batch()).square().mean().backward()
    optimizer.step()


def overlapped(net: nn.Module, n_steps: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    """Of two steps the second is put off."""
    wrapped = wrap(net, overlap_forward=True)
    optimizer = wrapped.overlap(torch.optim.SGD(net.parameters(), lr=0.1))
    for _ in range(n_steps):
        step(wrapped, optimizer)
    return wrapped, optimizer


def stepped(n_steps: int) -> list[torch.Tensor]:
    """The parameters after so many steps without overlap."""
    net = layers()
    wrapped, optimizer = wrap(net), torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(n_steps):
        step(wrapped, optimizer)
    return [parameter.detach() for parameter in net.parameters()]


def have_values(net: nn.Module, values: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, net.parameters(), values))


def n_averagers() -> int:
    from shoal.average import Averager

    gc.collect()
    return sum(type(one) is Averager for one in gc.get_objects())


def loaded(net: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    found: nn.Module = torch.load(file, weights_only=False)
    return found


def copy_models() -> None:
    """A copy has nothing of the overlap, and a model that is not stepped is not copied."""
    import shoal

    net = layers()
    wrapped, optimizer = overlapped(net)
    for of in (copy.deepcopy, loaded, pickle.dumps):
        with pytest.raises(shoal.UsageError, match=r"a step was put off.*model\.synchronize\(\)"):
            of(net)
    wrapped.synchronize()
    first, second, half = stepped(2), copy.deepcopy(net), loaded(net).half()
    assert have_values(second, first)
    step(wrapped, optimizer)
    for other in (second, loaded(second), half):
        other.state_dict()
        other(batch().to(other[0].weight.dtype)).sum().backward()
        other.load_state_dict(other.state_dict())
    assert wrapped.reducer.overlap._step is not None  # whatever was done with the copies
    wrapped.synchronize()
    assert have_values(net, stepped(3))
    assert have_values(second, first)


def wrap_without() -> None:
    """The optimizer's step is what it was, and nothing keeps the averager."""
    import shoal

    net = layers()
    net[0].requires_grad_(False)
    wrapped = wrap(net, overlap_forward=True)
    optimizer = wrapped.overlap(torch.optim.SGD(net[1].parameters(), lr=0.1))
    for _ in range(2):
        step(wrapped, optimizer)
    with pytest.raises(shoal.UsageError, match="put off already"):
        optimizer.step()
    averager = weakref.ref(wrapped.reducer.averaging.averager)
    net[0].requires_grad_(True)
    old, wrapped = wrapped, wrap(net)
    with pytest.raises(shoal.UsageError, match="wrapped anew; ask the new wrapper"):
        old.overlap(optimizer)
    del old
    assert "step" not in vars(optimizer)
    gc.collect()
    assert averager() is None
    assert n_averagers() == 1
    optimizer.add_param_group({"params": list(net[0].parameters())})
    before = net[0].weight.detach().clone()
    step(wrapped, optimizer)
    assert not torch.equal(net[0].weight, before)
    optimizer.state_dict()
    torch.save(net, io.BytesIO())


def put_schedulers_around() -> None:
    """What else is put in place of an optimizer's step stays, under that of overlap and over it."""
    net = layers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    under = vars(optimizer)["step"]
    wrap(net, overlap_forward=True).overlap(optimizer)
    assert vars(optimizer)["step"] is not under
    wrap(net)
    assert vars(optimizer)["step"] is under
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    wrap(net, overlap_forward=True).overlap(optimizer)
    seen: list[str] = []
    inner = optimizer.step
    optimizer.step = lambda: (seen.append("over"), inner())  # type: ignore[method-assign]
    plain = wrap(net)
    before = net[0].weight.detach().clone()
    step(plain, optimizer)
    assert seen == ["over"]
    assert not torch.equal(net[0].weight, before)


def drop_wrappers() -> None:
    """A model whose wrapper is gone takes the step that was put off, and then keeps nothing."""
    uses: list[Callable[[nn.Module], Any]] = [
        lambda net: net(batch()),
        lambda net: net.state_dict(),
        wrap,
    ]
    for use in uses:
        net = layers()
        _, optimizer = overlapped(net)
        del _
        assert n_averagers() == 1
        use(net)
        assert have_values(net, stepped(2))
        assert n_averagers() == 0
        net(batch()).square().mean().backward()
        optimizer.step()
        assert not have_values(net, stepped(2))
        torch.save(net, io.BytesIO())
    net = layers()
    overlapped(net)
    del net, optimizer
    assert n_averagers() == 0


def in_a_group(check: str) -> None:
    dist.init_process_group("shoal", timeout=timedelta(seconds=30))
    globals()[check]()
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "check", ["copy_models", "wrap_without", "put_schedulers_around", "drop_wrappers"]
)
def test_an_overlap_ends_with_its_wrapper_and_is_in_no_copy(check: str) -> None:
    run_ranks(in_a_group, 2, check)
