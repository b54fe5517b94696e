"""The calls of MPI, on NumPy arrays. Imports mpi4py, which only Open MPI's own environment has."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from mpi4py import MPI  # type: ignore[import-not-found]

from shoal.bench.collectives import there_and_back

if TYPE_CHECKING:
    from shoal.bench.collectives import Bind, Call, On

OPERATIONS: Final[Mapping[str, Any]] = MappingProxyType(
    {"sum": MPI.SUM, "product": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}
)
"""MPI's operations by shoal's names. MPI has no mean."""


def _reduce(on: On, data: Any, _other: Any) -> Call:
    if on.is_root:
        return partial(on.group.Reduce, MPI.IN_PLACE, data, on.op, on.root)
    return partial(on.group.Reduce, data, None, on.op, on.root)


def _all_gather(on: On, data: Any, other: Any) -> Call:
    return partial(on.group.Allgather, MPI.IN_PLACE if data is other else on.own(data), other)


def _reduce_scatter(on: On, data: Any, other: Any) -> Call:
    if data is other:
        raise NotImplementedError("MPI's reduce_scatter in place leaves every block at the start")
    return partial(on.group.Reduce_scatter_block, data, on.own(other), on.op)


def _gather(on: On, data: Any, other: Any) -> Call:
    block = MPI.IN_PLACE if on.is_root and data is other else on.own(data)
    return partial(on.group.Gather, block, other if on.is_root else None, on.root)


def _scatter(on: On, data: Any, other: Any) -> Call:
    block = MPI.IN_PLACE if on.is_root and data is other else on.own(other)
    return partial(on.group.Scatter, data if on.is_root else None, block, on.root)


def _ping_pong(on: On, data: Any, other: Any) -> Call:
    send = partial(on.group.Send, data, on.rank ^ 1)
    recv = partial(on.group.Recv, other, on.rank ^ 1)
    return there_and_back(on, send, recv)


MPI_CALLS: Final[Mapping[str, Bind]] = MappingProxyType(
    {
        "all_reduce": lambda on, data, _: partial(on.group.Allreduce, MPI.IN_PLACE, data, on.op),
        "broadcast": lambda on, data, _: partial(on.group.Bcast, data, on.root),
        "reduce": _reduce,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "gather": _gather,
        "scatter": _scatter,
        "all_to_all": lambda on, data, other: partial(on.group.Alltoall, data, other),
        "send_recv": _ping_pong,
        "barrier": lambda on, _data, _other: on.group.Barrier,
    }
)
