"""The table of all collectives: their buffers, root, folds and results.

Shapes, the planner, measurements, settings, the simulator, the command line, the docs and the tests
read these rows, and contain no code for a single collective.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from shoal.errors import UsageError, did_you_mean
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
    """True if it passed through exactly one Finish, False if through none."""


class Contract(NamedTuple):
    """One rank's part of a collective. INPUT is never written."""

    n_chunks: Mapping[Buffer, int]
    """The chunks of each of the caller's buffers; buffers not named have none."""
    precondition: Mapping[Place, Value]
    """The values before the first step. Places not named hold undefined values."""
    postcondition: Mapping[Place, Value]
    """The values required after the last step. Places not named may hold anything."""
    idempotent: bool = False
    """True if contributions may be folded in more than once and in any order, as by max."""


class Blocks(enum.Enum):
    """The ranks whose blocks a buffer of the caller holds."""

    NONE = enum.auto()
    OWN = enum.auto()
    """This rank's block."""
    ALL = enum.auto()
    """A block of every rank, in rank order."""
    AT_ROOT = enum.auto()
    """A block of every rank at the root, and none elsewhere."""


class Root(enum.Enum):
    """The part of the root in a collective; the value is its preposition in descriptions."""

    NONE = ""
    GIVES = "from"
    GETS = "to"


class Collective(NamedTuple):
    """The definition of a collective, whichever algorithm does it.

    Args:
        leaves: maps rank, size, root and chunk to the required value of that chunk of the result.
        reads: the blocks in INPUT.
        writes: the blocks in OUTPUT. Both NONE: it works in place on DATA, which algorithms cut as
            they like.
        root: the part of the root, if there is one.
        folds: True if it takes an operation.
        narrows: True if it may use a narrow codec: each contribution goes directly to the rank that
            folds it, so it is rounded once, or values rounded once are only moved.
        by_pair: True if only the two ranks that exchange a block need to know its length.
        carries: True if the caller passes elements; else one byte shows that a rank has arrived.
        idempotent: see `Contract`.
    """

    leaves: Callable[[int, int, int, int], Value]
    reads: Blocks = Blocks.NONE
    writes: Blocks = Blocks.NONE
    root: Root = Root.NONE
    folds: bool = False
    narrows: bool = False
    by_pair: bool = False
    carries: bool = True
    idempotent: bool = False

    @property
    def in_place(self) -> bool:
        """True if its one buffer is DATA."""
        return self.reads is self.writes is Blocks.NONE

    def contract(self, rank: int, size: int, n_chunks: int, root: int) -> Contract:
        """Return the contract of `rank`, with DATA in `n_chunks`; blocks are cut by rank."""
        n_blocks = {
            Blocks.NONE: 0,
            Blocks.OWN: 1,
            Blocks.ALL: size,
            Blocks.AT_ROOT: size * (rank == root),
        }
        counts = {Buffer.INPUT: n_blocks[self.reads], Buffer.OUTPUT: n_blocks[self.writes]}
        source, result = Buffer.INPUT, Buffer.OUTPUT
        if self.in_place:
            source = result = Buffer.DATA
            counts = {Buffer.DATA: n_chunks}
        n_brought = counts[source] * (self.root is not Root.GIVES or rank == root)
        return Contract(
            counts,
            {Place(source, c): Value(_only(rank), c) for c in range(n_brought)},
            {Place(result, c): self.leaves(rank, size, root, c) for c in range(counts[result])},
            self.idempotent,
        )


def _only(rank: int) -> range:
    return range(rank, rank + 1)


COLLECTIVES: Final[Mapping[str, Collective]] = MappingProxyType(
    {
        "all_reduce": Collective(
            leaves=lambda _rank, size, _root, chunk: Value(range(size), chunk, True),
            folds=True,
            narrows=True,
        ),
        "broadcast": Collective(
            leaves=lambda _rank, _size, root, chunk: Value(_only(root), chunk), root=Root.GIVES
        ),
        "reduce": Collective(
            leaves=lambda rank, size, root, chunk: (
                Value(range(size), chunk, True) if rank == root else Value(_only(rank), chunk)
            ),
            root=Root.GETS,
            folds=True,
        ),
        "all_gather": Collective(
            leaves=lambda _rank, _size, _root, block: Value(_only(block), 0),
            reads=Blocks.OWN,
            writes=Blocks.ALL,
            narrows=True,
        ),
        "reduce_scatter": Collective(
            leaves=lambda rank, size, _root, _block: Value(range(size), rank, True),
            reads=Blocks.ALL,
            writes=Blocks.OWN,
            folds=True,
            narrows=True,
        ),
        "gather": Collective(
            leaves=lambda _rank, _size, _root, block: Value(_only(block), 0),
            reads=Blocks.OWN,
            writes=Blocks.AT_ROOT,
            root=Root.GETS,
        ),
        "scatter": Collective(
            leaves=lambda rank, _size, root, _block: Value(_only(root), rank),
            reads=Blocks.AT_ROOT,
            writes=Blocks.OWN,
            root=Root.GIVES,
        ),
        "all_to_all": Collective(
            leaves=lambda rank, _size, _root, block: Value(_only(block), rank),
            reads=Blocks.ALL,
            writes=Blocks.ALL,
            by_pair=True,
        ),
        "barrier": Collective(
            leaves=lambda _rank, size, _root, chunk: Value(range(size), chunk),
            carries=False,
            idempotent=True,
        ),
    }
)

MESSAGE: Final = "send_recv"
"""The name of a message for `find` and shapes. Not a collective: two ranks call one half each."""


def row_of(collective: str) -> Collective:
    """Return the definition of a collective; UsageError lists all if there is none."""
    if collective not in COLLECTIVES:
        near = did_you_mean(collective, COLLECTIVES)
        raise UsageError(f"no collective {collective!r}: there are {', '.join(COLLECTIVES)}{near}")
    return COLLECTIVES[collective]


def contract_of(
    collective: str, rank: int, size: int, n_chunks: int, root: int = 0, n_servers: int = 0
) -> Contract:
    """Return a rank's contract with DATA in `n_chunks`, or UsageError if there can be none.

    The last `n_servers` ranks have neither input nor result.
    """
    row = row_of(collective)
    if not row.in_place and n_chunks != size:
        raise UsageError(f"{collective} over {size} ranks has {size} chunks, not {n_chunks}")
    if rank >= size - n_servers:
        return Contract({}, {}, {})
    return row.contract(rank, size - n_servers, n_chunks, root)
