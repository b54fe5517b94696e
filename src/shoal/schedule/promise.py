"""What each collective promises: what a rank brings, and what it is left with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple

from shoal.errors import UsageError
from shoal.schedule.steps import Buffer


class Place(NamedTuple):
    """One chunk of one buffer of a rank."""

    buffer: Buffer
    chunk: int


class Value(NamedTuple):
    """Chunk `chunk` of the contributions of `ranks`, each folded in exactly once."""

    ranks: range
    chunk: int
    finished: bool = False
    """Whether it passed through exactly one Finish. Otherwise it passed through none."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One rank's part of a collective. INPUT is never written, whatever else happens."""

    n_chunks: Mapping[Buffer, int]
    """How many chunks each of the caller's buffers has; buffers not named have none."""
    starts: Mapping[Place, Value]
    """What is held before the first step. Places not named hold nothing worth reading."""
    ends: Mapping[Place, Value]
    """What must be held after the last step. Places not named may hold anything."""
    idempotent: bool = False
    """Whether contributions may be folded in more than once and in any order: the fold is one
    like max, to which that makes no difference."""


def promise(collective: str, rank: int, size: int, n_chunks: int, root: int = 0) -> Promise:
    """What `collective` promises to `rank` when its longest buffer is cut into `n_chunks`.

    The halves of `send_recv` are called apart, so no rank alone can be promised anything.

    Raises:
        UsageError: there is no such collective, or it cannot be cut like that.
    """
    if collective not in _PROMISES:
        raise UsageError(f"no collective {collective!r}: there are {', '.join(_PROMISES)}")
    return _PROMISES[collective](rank, size, n_chunks, root)


def _all_reduce(rank: int, size: int, n_chunks: int, root: int) -> Promise:
    return Promise(
        n_chunks={Buffer.DATA: n_chunks},
        starts={Place(Buffer.DATA, c): Value(_only(rank), c) for c in range(n_chunks)},
        ends={Place(Buffer.DATA, c): Value(range(size), c, True) for c in range(n_chunks)},
    )


def _broadcast(rank: int, size: int, n_chunks: int, root: int) -> Promise:
    held = {Place(Buffer.DATA, c): Value(_only(root), c) for c in range(n_chunks)}
    return Promise({Buffer.DATA: n_chunks}, starts=held if rank == root else {}, ends=held)


def _all_gather(rank: int, size: int, n_chunks: int, root: int) -> Promise:
    _require_one_per_rank("all_gather", size, n_chunks)
    return Promise(
        n_chunks={Buffer.INPUT: 1, Buffer.OUTPUT: size},
        starts={Place(Buffer.INPUT, 0): Value(_only(rank), 0)},
        ends={Place(Buffer.OUTPUT, r): Value(_only(r), 0) for r in range(size)},
    )


def _reduce_scatter(rank: int, size: int, n_chunks: int, root: int) -> Promise:
    _require_one_per_rank("reduce_scatter", size, n_chunks)
    return Promise(
        n_chunks={Buffer.INPUT: size, Buffer.OUTPUT: 1},
        starts={Place(Buffer.INPUT, c): Value(_only(rank), c) for c in range(size)},
        ends={Place(Buffer.OUTPUT, 0): Value(range(size), rank, True)},
    )


def _reduce(rank: int, size: int, n_chunks: int, root: int) -> Promise:
    held = {Place(Buffer.DATA, c): Value(_only(rank), c) for c in range(n_chunks)}
    folded = {Place(Buffer.DATA, c): Value(range(size), c, True) for c in range(n_chunks)}
    return Promise({Buffer.DATA: n_chunks}, starts=held, ends=folded if rank == root else held)


def _gather(rank: int, size: int, n_chunks: int, root: int) -> Promise:
    _require_one_per_rank("gather", size, n_chunks)
    everyones = {Place(Buffer.OUTPUT, r): Value(_only(r), 0) for r in range(size)}
    return Promise(
        n_chunks={Buffer.INPUT: 1, Buffer.OUTPUT: size if rank == root else 0},
        starts={Place(Buffer.INPUT, 0): Value(_only(rank), 0)},
        ends=everyones if rank == root else {},
    )


def _scatter(rank: int, size: int, n_chunks: int, root: int) -> Promise:
    _require_one_per_rank("scatter", size, n_chunks)
    everyones = {Place(Buffer.INPUT, r): Value(_only(root), r) for r in range(size)}
    return Promise(
        n_chunks={Buffer.INPUT: size if rank == root else 0, Buffer.OUTPUT: 1},
        starts=everyones if rank == root else {},
        ends={Place(Buffer.OUTPUT, 0): Value(_only(root), rank)},
    )


def _all_to_all(rank: int, size: int, n_chunks: int, root: int) -> Promise:
    _require_one_per_rank("all_to_all", size, n_chunks)
    return Promise(
        n_chunks={Buffer.INPUT: size, Buffer.OUTPUT: size},
        starts={Place(Buffer.INPUT, r): Value(_only(rank), r) for r in range(size)},
        ends={Place(Buffer.OUTPUT, r): Value(_only(r), rank) for r in range(size)},
    )


def _barrier(rank: int, size: int, n_chunks: int, root: int) -> Promise:
    """Every rank has heard of every other."""
    return Promise(
        n_chunks={Buffer.DATA: n_chunks},
        starts={Place(Buffer.DATA, c): Value(_only(rank), c) for c in range(n_chunks)},
        ends={Place(Buffer.DATA, c): Value(range(size), c) for c in range(n_chunks)},
        idempotent=True,
    )


def _only(rank: int) -> range:
    return range(rank, rank + 1)


def _require_one_per_rank(collective: str, size: int, n_chunks: int) -> None:
    if n_chunks != size:
        raise UsageError(f"{collective} over {size} ranks has {size} chunks, not {n_chunks}")


_PROMISES: Final[Mapping[str, Callable[[int, int, int, int], Promise]]] = MappingProxyType(
    {
        "all_reduce": _all_reduce,
        "broadcast": _broadcast,
        "reduce": _reduce,
        "all_gather": _all_gather,
        "reduce_scatter": _reduce_scatter,
        "gather": _gather,
        "scatter": _scatter,
        "all_to_all": _all_to_all,
        "barrier": _barrier,
    }
)
