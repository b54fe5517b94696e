"""Shared code of the tests of shoal's DistributedDataParallel."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

N_ROWS = 4  # of each rank's batch
SMALL_MB = 256 / (1 << 20)  # so that parameters span buffers

Wrap = Callable[..., Any]
Gradients = list[torch.Tensor | None]


def wrap(module: nn.Module, *, hook: Any = None, **options: Any) -> Any:
    import shoal.torch

    options = {"bucket_cap_mb": SMALL_MB, **options}
    wrapped = shoal.torch.DistributedDataParallel(module, **options)
    if hook is not None:
        wrapped.register_comm_hook(wrapped.process_group, hook)
    return wrapped


def whole(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return small integers."""
    source = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=source).to(dtype)


class Two(nn.Module):
    """Two parallel layers, the second of them optional."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Linear(6, 3, dtype=dtype)
        self.second = nn.Linear(6, 3, dtype=dtype)
        for at, parameter in enumerate(self.parameters()):
            parameter.data = whole(tuple(parameter.shape), seed + at, dtype)

    def forward(self, data: torch.Tensor, both: bool = True) -> torch.Tensor:
        return self.first(data) + (self.second(data) if both else 0)


class OneOf(nn.Module):
    def __init__(self, *parameters: torch.Tensor) -> None:
        super().__init__()
        self.parts = nn.ParameterList(map(nn.Parameter, parameters))

    def forward(self, factor: float) -> torch.Tensor:
        return sum((part * factor).abs().double().sum() for part in self.parts)  # type: ignore[return-value]


class Boxed(nn.Sequential):
    """A model whose output type torch does not search for tensors."""

    def forward(self, given: torch.Tensor) -> Any:
        held = super().forward(given)
        return lambda: held


def inputs(step: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of all ranks."""
    n_rows = N_ROWS * dist.get_world_size()
    return whole((n_rows, 6), 100 + step, dtype), whole((n_rows, 3), 200 + step, dtype)


def mine(tensor: torch.Tensor) -> torch.Tensor:
    rank = dist.get_rank()
    return tensor[N_ROWS * rank : N_ROWS * (rank + 1)]


def assert_averaged(net: nn.Module, *given: Any, may_have_zeros: bool = False) -> None:
    """Check that gradients equal those of one process with the inputs of all ranks.

    Args:
        may_have_zeros: gradients of unused parameters need not be None.
    """
    alone = copy.deepcopy(net)
    alone.zero_grad()
    (alone(*given).sum() / dist.get_world_size()).backward()
    for ours, wanted in zip(net.parameters(), alone.parameters(), strict=True):
        if wanted.grad is not None:
            assert torch.equal(ours.grad, wanted.grad)
        else:
            assert ours.grad is None or may_have_zeros


def fail(_gradient: torch.Tensor) -> None:
    """A hook of a gradient, whose pass raises."""
    raise ValueError("not this time")


def randoms(number: int) -> torch.Tensor:
    """Return this rank's inputs of a step."""
    source = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randn(4, 6, dtype=torch.float64, generator=source)


def gradients(net: nn.Module) -> Gradients:
    return [p.grad if p.grad is None else p.grad.clone() for p in net.parameters()]


def run_case(case: Callable[..., Any]) -> None:
    """On a rank: run a case, with shoal's wrapper and with torch's over Gloo if it takes one."""
    if not case.__code__.co_argcount:
        case()
        return
    options = {"process_group": dist.new_group(backend="gloo"), "bucket_cap_mb": SMALL_MB}
    theirs = case(functools.partial(nn.parallel.DistributedDataParallel, **options))
    torch.testing.assert_close(case(wrap), theirs, rtol=1e-9, atol=1e-12)
