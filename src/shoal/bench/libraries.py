"""The libraries under one interface: one function each, which joins a group and binds its calls.

Each function imports its library when called, because no process uses all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shoal.bench.collectives import On, there_and_back
from shoal.bench.elements import ELEMENTS
from shoal.bench.values import FilledBuffer
from shoal.codec import Codec, parse_wire

if TYPE_CHECKING:
    from shoal.bench.collectives import Bind, Call, CallSpec


@dataclass(frozen=True)
class LibraryRank:
    """One rank in the group of one library.

    Args:
        allocate: makes a tensor with a number of elements and a dtype by shoal's name.
        barrier: waits for all ranks.
        bind: makes the call of a collective on two tensors.
        close: leaves the group.
        ranks: the participating ranks, whose tensors all_reduce sums.
        codec: rounds sums of float32 between hosts.
    """

    rank: int
    allocate: Callable[[int, str], FilledBuffer]
    barrier: Callable[[], object]
    bind: Callable[[CallSpec, Any, Any], Call]
    close: Callable[[], object]
    ranks: Sequence[int]
    codec: Codec = Codec.IDENTITY


def join_torch(backend: str) -> LibraryRank:
    """Join `torch.distributed`, with Gloo or shoal as backend."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(backend)
    return torch_library(backend, None, dist.destroy_process_group)


def torch_library(backend: str, group: Any, close: Callable[[], object]) -> LibraryRank:
    """Return this rank of a process group of all ranks; None is the default group."""
    import torch.distributed as dist

    from shoal.bench.torch_calls import allocate_torch, bind_torch

    return LibraryRank(
        rank=dist.get_rank(),
        allocate=allocate_torch,
        barrier=partial(dist.barrier, group=group),
        bind=partial(bind_torch, group),
        close=close,
        ranks=range(dist.get_world_size()),
        codec=_codec_of(None) if backend == "shoal" else Codec.IDENTITY,
    )


def join_group(wire: str | None = None) -> LibraryRank:
    """Join a shoal group on NumPy arrays, without a framework."""
    import shoal

    return group_library(shoal.init(wire=wire), wire)


def _ping_pong(on: On, data: Any, other: Any) -> Call:
    send = partial(on.group.send, data, on.rank ^ 1)
    recv = partial(on.group.recv, other, on.rank ^ 1)
    return there_and_back(on, send, recv)


_GROUP_CALLS: Final[Mapping[str, Bind]] = MappingProxyType(
    {
        "all_reduce": lambda on, data, _: partial(on.group.all_reduce, data, on.op),
        "broadcast": lambda on, data, _: partial(on.group.broadcast, data, on.root),
        "reduce": lambda on, data, _: partial(on.group.reduce, data, on.root, on.op),
        "all_gather": lambda on, data, other: partial(on.group.all_gather, other, on.own(data)),
        "reduce_scatter": lambda on, data, other: partial(
            on.group.reduce_scatter, on.own(other), data, on.op
        ),
        "gather": lambda on, data, other: partial(
            on.group.gather, other if on.is_root else None, on.own(data), on.root
        ),
        "scatter": lambda on, data, other: partial(
            on.group.scatter, on.own(other), data if on.is_root else None, on.root
        ),
        "all_to_all": lambda on, data, other: partial(on.group.all_to_all, other, data),
        "send_recv": _ping_pong,
        "barrier": lambda on, _data, _other: on.group.barrier,
    }
)


def group_library(group: Any, wire: str | None = None) -> LibraryRank:
    """Return this rank of a shoal group."""
    from shoal.dtypes import parse_op

    def bind(what: CallSpec, data: Any, other: Any) -> Call:
        on = On(group, group.rank, group.size, parse_op(what.op), what.root)
        return _GROUP_CALLS[what.collective](on, data, other)

    return LibraryRank(
        rank=group.rank,
        allocate=allocate_array,
        barrier=group.barrier,
        bind=bind,
        close=group.close,
        ranks=range(group.size),
        codec=_codec_of(wire),
    )


def _codec_of(wire: str | None) -> Codec:
    """Return the codec of a group created with `wire`."""
    return parse_wire(wire or os.environ.get("SHOAL_WIRE") or Codec.IDENTITY)


def allocate_array(n_elems: int, dtype: str) -> FilledBuffer:
    """Make an array; NotImplementedError for dtypes that NumPy does not have."""
    element = ELEMENTS[dtype]
    if element.storage != element.name:
        raise NotImplementedError(f"NumPy has no {dtype}: measure it through torch")
    array = np.empty(n_elems, np.dtype(element.storage))
    return FilledBuffer(array, array)


JOIN: Final[Mapping[str, Callable[[], LibraryRank]]] = {
    "gloo": partial(join_torch, "gloo"),
    "shoal": partial(join_torch, "shoal"),
    "group": join_group,
}
