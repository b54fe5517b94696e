"""The timed collectives: the result of each call, by its contract, and its bus bandwidth.

A call works on two tensors of one size, `data` and `other`. If a collective cuts its larger tensor
into one block per rank, its smaller tensor is this rank's block of the other one. The call works in
place if both are the same tensor. torch_calls.py and libraries.py make the calls of each library.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from shoal.bench.values import Contribution
from shoal.schedule.collectives import COLLECTIVES as ROWS
from shoal.schedule.collectives import MESSAGE, Blocks, Collective, Root

Call = Callable[[], object]


class CallSpec(NamedTuple):
    """The arguments of a call. Sent to ranks as JSON, by these names.

    Args:
        n_bytes: the size of a rank's larger tensor.
        in_place: None if the collective has only one way.
    """

    n_bytes: int
    collective: str = "all_reduce"
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    in_place: bool | None = None


class On(NamedTuple):
    """The context of a call: a group of some library, the rank in it, and the operation."""

    group: Any
    rank: int
    size: int
    op: Any
    root: int

    def own(self, tensor: Any) -> Any:
        """Return this rank's block of a tensor."""
        n = len(tensor) // self.size
        return tensor[self.rank * n : (self.rank + 1) * n]

    @property
    def is_root(self) -> bool:
        return self.rank == self.root


Bind = Callable[[On, Any, Any], Call]
"""A function of (on, data, other) that returns the call."""


def there_and_back(on: On, send: Call, recv: Call) -> Call:
    """Return a call in which ranks 0 and 1, 2 and 3, and so on send a message and one back."""
    first, second = (send, recv) if on.rank % 2 == 0 else (recv, send)

    def call() -> None:
        first()
        second()

    return call


@dataclass(frozen=True)
class MeasuredCollective:
    """One collective.

    Args:
        row: its definition; None for a message there and back, which only pairs of ranks make.
        bus: bus bandwidth as a multiple of algorithm bandwidth, by the number of ranks: the least
            data that each must send or receive, in sizes. As in nccl-tests, the factor is the same
            for any algorithm, and for comparison also with servers.
        in_place: the available ways: True if the result is in `data`, False if in `other`.
        each: every rank has its own tensor of full size, so the ranks of a host add up.
    """

    row: Collective | None
    bus: Callable[[int], float]
    in_place: tuple[bool, ...]
    each: bool = False

    @property
    def cut(self) -> bool:
        """True if a tensor has a block for each rank, with at least one element."""
        return self.row is not None and not self.row.in_place

    @property
    def folds(self) -> bool:
        return self.row is not None and self.row.folds

    @property
    def rooted(self) -> bool:
        return self.row is not None and self.row.root is not Root.NONE

    @property
    def in_pairs(self) -> bool:
        """True if only ranks 0 and 1, 2 and 3 and so on exchange messages."""
        return self.row is None

    def is_in_place(self, asked: bool | None) -> bool:
        """Return True if a call works in place: as requested, or by the collective's first way."""
        return self.in_place[0] if asked is None else asked

    def want(
        self, rank: int, ranks: Sequence[int], n: int, root: int
    ) -> Mapping[int, Contribution]:
        """Return the required blocks of a rank's result by number, each of `n` elements.

        Empty if nothing is promised: in a barrier, and on ranks other than the root of a reduce.
        """
        row = self.row
        if row is None:
            return {0: Contribution([rank ^ 1])}
        if not row.carries or (row.root is Root.GETS and rank != root):
            return {}
        first = rank if row.writes is Blocks.OWN else 0
        blocks = {}
        for place, value in row.contract(rank, len(ranks), 1, root).postcondition.items():
            start = value.ranks.start if row.reads is Blocks.OWN else value.chunk
            blocks[first + place.chunk] = Contribution([ranks[r] for r in value.ranks], start * n)
        return blocks


def _once(_size: int) -> float:
    return 1.0


def _without_own(size: int) -> float:
    return (size - 1) / size


_BUS: Final[Mapping[str, Callable[[int], float]]] = {
    "all_reduce": lambda size: 2 * _without_own(size),
    "broadcast": _once,
    "reduce": _once,
    "barrier": lambda _size: 0.0,
}

COLLECTIVES: Final[Mapping[str, MeasuredCollective]] = MappingProxyType(
    {
        name: MeasuredCollective(row, _BUS.get(name, _without_own), ways, row.by_pair)
        for name, row in ROWS.items()
        for ways in [(True,) if row.in_place else (False,) if row.by_pair else (False, True)]
    }
    # There and back: one after the other.
    | {MESSAGE: MeasuredCollective(None, lambda _size: 2.0, (False,))}
)
