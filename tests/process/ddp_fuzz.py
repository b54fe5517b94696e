"""Random models, trained in random ways, by shoal's DistributedDataParallel and by torch's.

Everything is a small whole number, or a fraction of a power of two: float64 holds each sum exactly
in whatever order it is taken, as long as the number of ranks is a power of two. So no bit differs.
"""

from __future__ import annotations

import contextlib
import random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from process.ddp_training import whole
from torch import nn
from torch.utils.checkpoint import checkpoint

N_ROWS = 3
_MOST = 2  # of what a weight is rounded to after a step


class Net(nn.Module):
    """Layers that are called in whatever order, and parameters of every kind beside them."""

    def __init__(self, source: random.Random) -> None:
        super().__init__()
        n_layers, self.width = source.randint(2, 5), source.choice([4, 7, 12])
        self.layers = nn.ModuleList(
            nn.Linear(self.width, self.width, bias=source.random() < 0.7, dtype=torch.float64)
            for _ in range(n_layers)
        )
        if source.random() < 0.4:
            self.layers[-1].weight = self.layers[0].weight
        kinds = [torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.float32]
        beside = [torch.zeros(self.width, dtype=d) for d in kinds if source.random() < 0.3]
        beside += [torch.zeros(self.width, 2 * self.width, dtype=torch.float64).t()[::2]]
        beside += [torch.zeros(0, 3), torch.zeros((), dtype=torch.float64)]
        self.beside = nn.ParameterList(beside)
        for seed, parameter in enumerate(self.parameters()):
            parameter.data.copy_(whole(tuple(parameter.shape), seed, parameter.dtype))
            parameter.data.clamp_(-1, 1) if not parameter.is_complex() else None
        if source.random() < 0.3:
            self.layers[1].requires_grad_(False)

    def forward(self, data: torch.Tensor, order: list[int], recomputes: bool) -> dict[str, Any]:
        for at, index in enumerate(order):
            layer = self.layers[index]
            if recomputes and at % 2:
                data = checkpoint(layer, data, use_reentrant=False)
            else:
                data = layer(data)
            data = torch.relu(data) if at % 2 else data
        beside = [(p * (3 if at % 2 else -1)).sum() for at, p in enumerate(self.beside)]
        total = sum(part.real.double() if part.is_complex() else part.double() for part in beside)
        return {"left": data[:, :2], "right": [data[:, 2:], total]}


class Case(NamedTuple):
    """How one model is trained: drawn from a seed, the same for both wrappers."""

    seed: int
    options: dict[str, Any]
    n_steps: int
    turns_at: int  # the step from which layers are called in another order
    recomputes: bool
    clips: bool
    sets_to_none: bool

    @classmethod
    def draw(cls, seed: int) -> Case:
        source = random.Random(seed)
        unused = source.random() < 0.5
        options = {
            "find_unused_parameters": unused,
            "static_graph": not unused and source.random() < 0.2,
            "bucket_cap_mb": source.choice([128, 512, 4096, 1 << 20]) / (1 << 20),
            **source.choice([{}, {"gradient_as_bucket_view": source.random() < 0.5}]),
        }
        return cls(
            seed,
            options,
            n_steps=source.randint(3, 8),
            turns_at=source.randint(1, 5),
            recomputes=source.random() < 0.3,
            clips=source.random() < 0.3,
            sets_to_none=source.random() < 0.6,
        )


def trained(case: Case, wrap: Any) -> list[list[torch.Tensor | None]]:
    """The gradients after each step, and the parameters in the end."""
    source, own = random.Random(case.seed), random.Random(31 * case.seed + dist.get_rank())
    net = Net(source)
    wrapped = wrap(net, **case.options)
    parameters = [p for p in net.parameters() if p.requires_grad]
    make = source.choice([{"momentum": 0.5}, {}, {"weight_decay": 0.5, "foreach": True}])
    optimizer = torch.optim.SGD(parameters, lr=2.0**-6, **make)
    seen = []
    for step in range(case.n_steps):
        if source.random() < 0.8:
            optimizer.zero_grad(case.sets_to_none if source.random() < 0.8 else step % 2 == 0)
        _accumulate(case, step, wrapped, source, own)
        seen.append([p.grad if p.grad is None else p.grad.clone() for p in net.parameters()])
        if case.clips:
            nn.utils.clip_grad_value_(parameters, 2.0) if not _any_complex(parameters) else None
        optimizer.step()
        with torch.no_grad():
            for parameter in parameters:  # whole and small again, so that sums stay exact
                parts = torch.view_as_real(parameter) if parameter.is_complex() else parameter
                parts.round_().clamp_(-_MOST, _MOST)
    seen.append([parameter.detach().clone() for parameter in net.parameters()])
    return seen


def _accumulate(
    case: Case, step: int, wrapped: Any, source: random.Random, own: random.Random
) -> None:
    """The forward and backward passes of one step."""
    net, is_static = wrapped.module, case.options["static_graph"]
    n_micro = 1 if is_static else source.choice([1, 1, 2, 3])
    for micro in range(n_micro):
        order = _order(case, step, len(net.layers), source, own)
        seed = 1000 * case.seed + 10 * step + micro + 77 * dist.get_rank()
        data = whole((N_ROWS, net.width), seed).clamp_(-1, 1)
        looks = not is_static and source.random() < 0.2
        with wrapped.no_sync() if micro < n_micro - 1 else contextlib.nullcontext():
            if looks:
                with torch.no_grad():
                    wrapped(data, order, False)
            output = wrapped(data, order, case.recomputes)
            right, total = output["right"]
            (output["left"].sum() - right.sum() + (dist.get_rank() + 1) * total).backward()


def _order(
    case: Case, step: int, n_layers: int, source: random.Random, own: random.Random
) -> list[int]:
    """The layers that this rank calls, one after the other."""
    order = list(range(n_layers))
    if case.options["static_graph"]:
        return order
    if step >= case.turns_at:
        order.reverse()
    if source.random() < 0.2:
        source.shuffle(order)
    if case.options["find_unused_parameters"]:  # ranks differ
        order = [index for index in order if own.random() < 0.7] or [0]
    return order + order[:1] if source.random() < 0.3 else order


def _any_complex(parameters: list[torch.Tensor]) -> bool:
    return any(parameter.is_complex() for parameter in parameters)
