"""Every collective of torch.distributed as a call to be timed, and what it must leave.

A call works on two float32 tensors of one size, `data` and `other`. Where a collective cuts a
tensor in one block per rank, that is the larger of the two it takes, and the smaller one is the
first part of the other tensor. The root is rank 0. Names that torch 2.13 has renamed are called by
the new one where there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from shoal.bench.values import Contribution

N_BUCKETS: Final = 8

Call = Callable[[], object]
Want = Callable[[int, Sequence[int], int], list[Contribution]]


class On(NamedTuple):
    """Where a call is made: torch.distributed itself, a group of it, and who calls."""

    dist: Any
    group: Any
    rank: int
    size: int


@dataclass(frozen=True)
class MeasuredCollective:
    """One collective.

    Args:
        bind: the call on (where, data, other).
        want: the blocks of the result, by (rank, ranks, elements of a block); empty where nothing
            is promised.
        cut: in blocks of one rank each; a block must have an element.
        in_place: the result is in `data`; otherwise it is in `other`.
    """

    bind: Callable[[On, Any, Any], Call]
    want: Want
    cut: bool = False
    in_place: bool = False


def _all_gather(on: On, data: Any, other: Any) -> Call:
    block = data[: len(data) // on.size]
    function = getattr(on.dist, "all_gather_single", None) or on.dist.all_gather_into_tensor
    return partial(function, other, block, group=on.group)


def _reduce_scatter(on: On, data: Any, other: Any) -> Call:
    block = other[: len(data) // on.size]
    function = getattr(on.dist, "reduce_scatter_single", None) or on.dist.reduce_scatter_tensor
    return partial(function, block, data, group=on.group)


def _gather(on: On, data: Any, other: Any) -> Call:
    block = data[: len(data) // on.size]
    blocks = list(other.chunk(on.size)) if on.rank == 0 else None
    return partial(on.dist.gather, block, blocks, dst=0, group=on.group)


def _scatter(on: On, data: Any, other: Any) -> Call:
    block = other[: len(data) // on.size]
    blocks = list(data.chunk(on.size)) if on.rank == 0 else None
    return partial(on.dist.scatter, block, blocks, src=0, group=on.group)


def _ping_pong(on: On, data: Any, other: Any) -> Call:
    """Ranks 0 and 1, 2 and 3, and so on: there and back."""
    send = partial(on.dist.send, data, on.rank ^ 1, group=on.group)
    recv = partial(on.dist.recv, other, on.rank ^ 1, group=on.group)
    first, second = (send, recv) if on.rank % 2 == 0 else (recv, send)

    def call() -> None:
        first()
        second()

    return call


def _buckets(on: On, data: Any, _other: Any) -> Call:
    """Several all-reduces in flight at once, each of a part of the tensor."""
    parts = data.chunk(N_BUCKETS)

    def call() -> None:
        works = [on.dist.all_reduce(part, group=on.group, async_op=True) for part in parts]
        for work in works:
            work.wait()

    return call


def _sum(_rank: int, ranks: Sequence[int], _n: int) -> list[Contribution]:
    return [Contribution(ranks)]


def _each(_rank: int, ranks: Sequence[int], _n: int) -> list[Contribution]:
    return [Contribution([peer]) for peer in ranks]


def _at_root(want: Want) -> Want:
    return lambda rank, ranks, n: want(rank, ranks, n) if rank == 0 else []


COLLECTIVES: Final[Mapping[str, MeasuredCollective]] = MappingProxyType(
    {
        "all_reduce": MeasuredCollective(
            lambda on, data, _other: partial(on.dist.all_reduce, data, group=on.group),
            _sum,
            in_place=True,
        ),
        "broadcast": MeasuredCollective(
            lambda on, data, _other: partial(on.dist.broadcast, data, src=0, group=on.group),
            lambda _rank, _ranks, _n: [Contribution([0])],
            in_place=True,
        ),
        "reduce": MeasuredCollective(
            lambda on, data, _other: partial(on.dist.reduce, data, dst=0, group=on.group),
            _at_root(_sum),
            in_place=True,
        ),
        "all_gather": MeasuredCollective(_all_gather, _each, cut=True),
        "reduce_scatter": MeasuredCollective(
            _reduce_scatter, lambda rank, ranks, n: [Contribution(ranks, rank * n)], cut=True
        ),
        "gather": MeasuredCollective(_gather, _at_root(_each), cut=True),
        "scatter": MeasuredCollective(
            _scatter, lambda rank, _ranks, n: [Contribution([0], rank * n)], cut=True
        ),
        "all_to_all": MeasuredCollective(
            lambda on, data, other: partial(on.dist.all_to_all_single, other, data, group=on.group),
            lambda rank, ranks, n: [Contribution([peer], rank * n) for peer in ranks],
            cut=True,
        ),
        "send_recv": MeasuredCollective(
            _ping_pong, lambda rank, _ranks, _n: [Contribution([rank ^ 1])]
        ),
        "barrier": MeasuredCollective(
            lambda on, _data, _other: partial(on.dist.barrier, group=on.group),
            lambda _rank, _ranks, _n: [],
            in_place=True,
        ),
    }
)

# Whatever a rank can be told to call: what is no collective of its own is no part of the grid.
CALLS: Final[Mapping[str, MeasuredCollective]] = MappingProxyType(
    {**COLLECTIVES, "buckets": MeasuredCollective(_buckets, _sum, in_place=True)}
)
