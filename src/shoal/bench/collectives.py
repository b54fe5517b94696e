"""Every collective that is timed, a row each: the result of a call, and its bus bandwidth.

A call works on two tensors of one size, `data` and `other`. Where a collective cuts a tensor in one
block per rank, that is the larger of the two it takes, and the smaller one is this rank's block of
the other tensor: where both are the same tensor, the call works in place. torch_calls.py,
group_calls.py and mpi_calls.py say how each library is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from shoal.bench.values import Contribution

Call = Callable[[], object]
Want = Callable[[int, Sequence[int], int, int], Mapping[int, Contribution]]


class CallSpec(NamedTuple):
    """The arguments of a call. Sent to ranks as JSON, by these names.

    Args:
        n_bytes: the size of the larger tensor where a rank's two tensors differ.
        in_place: None where the collective has one way only.
    """

    n_bytes: int
    collective: str = "all_reduce"
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0
    in_place: bool | None = None


class On(NamedTuple):
    """Where a call is made: a group of some library, the rank there, and what it folds by."""

    group: Any
    rank: int
    size: int
    op: Any
    root: int

    def own(self, tensor: Any) -> Any:
        """This rank's block of a tensor."""
        n = len(tensor) // self.size
        return tensor[self.rank * n : (self.rank + 1) * n]

    @property
    def is_root(self) -> bool:
        """True if this rank gives or gets all."""
        return self.rank == self.root


Bind = Callable[[On, Any, Any], Call]
"""Makes the call on (where, data, other)."""


def there_and_back(on: On, send: Call, recv: Call) -> Call:
    """Ranks 0 and 1, 2 and 3, and so on: a message, and one in return."""
    first, second = (send, recv) if on.rank % 2 == 0 else (recv, send)

    def call() -> None:
        first()
        second()

    return call


def _once(_size: int) -> float:
    return 1.0


def _without_own(size: int) -> float:
    return (size - 1) / size


@dataclass(frozen=True)
class MeasuredCollective:
    """One collective.

    Args:
        want: the blocks of the result by number, by (rank, ranks, elements of a block, root);
            empty where nothing is promised.
        bus: bus bandwidth as a multiple of algorithm bandwidth, by the number of ranks: what each
            must send or get at least, in sizes. nccl-tests has the same factor, for any
            algorithm, with servers too: else it could not be compared.
        cut: in blocks of one rank each; a block must have an element.
        in_place: the ways there are: True if the result is in `data`, False if in `other`.
        folds: True if it takes an operation.
        rooted: True if it has a root.
        in_pairs: ranks 0 and 1, 2 and 3 and so on have to do with each other, and with no others.
        each: every rank brings a whole size of its own, so that those of one host add up.
    """

    want: Want
    bus: Callable[[int], float] = _once
    cut: bool = False
    in_place: tuple[bool, ...] = (True,)
    folds: bool = False
    rooted: bool = False
    each: bool = False
    in_pairs: bool = False

    def is_in_place(self, asked: bool | None) -> bool:
        """Return True if a call works in place: as asked, or in the first way of the collective."""
        return self.in_place[0] if asked is None else asked


_BOTH: Final = (False, True)


def _sum(_rank: int, ranks: Sequence[int], _n: int, _root: int) -> Mapping[int, Contribution]:
    return {0: Contribution(ranks)}


def _each(_rank: int, ranks: Sequence[int], n: int, _root: int) -> Mapping[int, Contribution]:
    return {block: Contribution([peer], block * n) for block, peer in enumerate(ranks)}


def _at_root(want: Want) -> Want:
    return lambda rank, ranks, n, root: want(rank, ranks, n, root) if rank == root else {}


COLLECTIVES: Final[Mapping[str, MeasuredCollective]] = MappingProxyType(
    {
        "all_reduce": MeasuredCollective(_sum, lambda size: 2 * _without_own(size), folds=True),
        "broadcast": MeasuredCollective(
            lambda _rank, _ranks, _n, root: {0: Contribution([root])}, rooted=True
        ),
        "reduce": MeasuredCollective(_at_root(_sum), folds=True, rooted=True),
        "all_gather": MeasuredCollective(_each, _without_own, cut=True, in_place=_BOTH),
        "reduce_scatter": MeasuredCollective(
            lambda rank, ranks, n, _root: {rank: Contribution(ranks, rank * n)},
            _without_own,
            cut=True,
            in_place=_BOTH,
            folds=True,
        ),
        "gather": MeasuredCollective(
            _at_root(_each), _without_own, cut=True, in_place=_BOTH, rooted=True
        ),
        "scatter": MeasuredCollective(
            lambda rank, _ranks, n, root: {rank: Contribution([root], rank * n)},
            _without_own,
            cut=True,
            in_place=_BOTH,
            rooted=True,
        ),
        "all_to_all": MeasuredCollective(
            lambda rank, ranks, n, _root: {
                block: Contribution([peer], rank * n) for block, peer in enumerate(ranks)
            },
            _without_own,
            cut=True,
            in_place=(False,),
            each=True,
        ),
        "send_recv": MeasuredCollective(  # there and back: one after the other
            lambda rank, _ranks, _n, _root: {0: Contribution([rank ^ 1])},
            lambda _size: 2.0,
            in_place=(False,),
            in_pairs=True,
        ),
        "barrier": MeasuredCollective(lambda _rank, _ranks, _n, _root: {}, lambda _size: 0.0),
    }
)
