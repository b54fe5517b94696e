"""The calls of torch.distributed, under torch 2.13's new names if they exist."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist

from shoal.bench.collectives import On, there_and_back
from shoal.bench.values import FilledBuffer

if TYPE_CHECKING:
    from shoal.bench.collectives import Bind, Call, CallSpec


def _all_gather(on: On, data: Any, other: Any) -> Call:
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return partial(function, other, on.own(data), group=on.group)


def _reduce_scatter(on: On, data: Any, other: Any) -> Call:
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return partial(function, on.own(other), data, on.op, group=on.group)


def _gather(on: On, data: Any, other: Any) -> Call:
    blocks = list(other.chunk(on.size)) if on.is_root else None
    return partial(dist.gather, on.own(data), blocks, dst=on.root, group=on.group)


def _scatter(on: On, data: Any, other: Any) -> Call:
    blocks = list(data.chunk(on.size)) if on.is_root else None
    return partial(dist.scatter, on.own(other), blocks, src=on.root, group=on.group)


def _ping_pong(on: On, data: Any, other: Any) -> Call:
    send = partial(dist.send, data, on.rank ^ 1, group=on.group)
    recv = partial(dist.recv, other, on.rank ^ 1, group=on.group)
    return there_and_back(on, send, recv)


TORCH_CALLS: Final[Mapping[str, Bind]] = MappingProxyType(
    {
        "all_reduce": lambda on, data, _: partial(dist.all_reduce, data, on.op, group=on.group),
        "broadcast": lambda on, data, _: partial(dist.broadcast, data, src=on.root, group=on.group),
        "reduce": lambda on, data, _: partial(
            dist.reduce, data, dst=on.root, op=on.op, group=on.group
        ),
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "gather": _gather,
        "scatter": _scatter,
        "all_to_all": lambda on, data, other: partial(
            dist.all_to_all_single, other, data, group=on.group
        ),
        "send_recv": _ping_pong,
        "barrier": lambda on, _data, _other: partial(dist.barrier, group=on.group),
    }
)


def bind_torch(group: Any, what: CallSpec, data: Any, other: Any) -> Call:
    """Return the call of a collective in a process group; None is the default group."""
    op = getattr(dist.ReduceOp, what.op.upper())
    on = On(group, dist.get_rank(group), dist.get_world_size(group), op, what.root)
    return TORCH_CALLS[what.collective](on, data, other)


def allocate_torch(n_elems: int, dtype: str) -> FilledBuffer:
    """Make a tensor."""
    return filled(torch.empty(n_elems, dtype=getattr(torch, dtype)))


def filled(tensor: torch.Tensor) -> FilledBuffer:
    """Return a tensor and a NumPy view of its values."""
    shown = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    return FilledBuffer(tensor, shown.numpy())
