"""What the tests of shoal's DistributedDataParallel share."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

N_ROWS = 4  # of each rank's batch
SMALL_MB = 256 / (1 << 20)  # so that parameters span buffers


def start() -> None:
    dist.init_process_group("shoal", timeout=timedelta(seconds=30))


def wrap(module: nn.Module, **options: Any) -> Any:
    import shoal.torch

    return shoal.torch.DistributedDataParallel(module, **{"bucket_cap_mb": SMALL_MB, **options})


def whole(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Small whole numbers."""
    source = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=source).to(dtype)


class OneOf(nn.Module):
    def __init__(self, *parameters: torch.Tensor) -> None:
        super().__init__()
        self.parts = nn.ParameterList(map(nn.Parameter, parameters))

    def forward(self, factor: float) -> torch.Tensor:
        return sum((part * factor).abs().double().sum() for part in self.parts)  # type: ignore[return-value]


def inputs(step: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of all ranks."""
    n_rows = N_ROWS * dist.get_world_size()
    return whole((n_rows, 6), 100 + step, dtype), whole((n_rows, 3), 200 + step, dtype)


def mine(tensor: torch.Tensor) -> torch.Tensor:
    rank = dist.get_rank()
    return tensor[N_ROWS * rank : N_ROWS * (rank + 1)]


def assert_same_bits(one: list[Any], other: list[Any]) -> None:
    for number, (ours, theirs) in enumerate(zip(one, other, strict=True)):
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            same = a is b if a is None or b is None else torch.equal(a, b)
            assert same, f"step {number}, parameter {index}: {a} and {b}"
