"""Kinds of calls that servers may take part in."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shoal.codec import Codec
from shoal.dtypes import item_size
from shoal.plan.text import show_bytes
from shoal.shapes import Shape

if TYPE_CHECKING:
    from shoal.dtypes import DType, Op
    from shoal.group.pool.rails import Rail, RailPart


class Kind(NamedTuple):
    """An all-reduce, by all that its plans depend on.

    Args:
        n_lanes: channels of the workers' group that it is cut over.
        pieces: in which it goes along the rails, where several workers share a host.
        n_pieces: of a call whose pieces follow one another, if this is one of them.
    """

    dtype: DType
    op: Op
    n_elems: int
    codec: Codec
    n_lanes: int = 1
    pieces: tuple[RailPart, ...] = ()
    n_pieces: int = 1

    def __str__(self) -> str:
        codec = "" if self.codec is Codec.IDENTITY else f" in {self.codec}"
        return f"all_reduce of {show_bytes(self.n_bytes)} {self.dtype}{codec}, {self.op}"

    @property
    def n_bytes(self) -> int:
        """The length of the buffer."""
        return self.n_elems * item_size(self.dtype)

    def shape(self, algorithm: str, rank: int, size: int, n_lanes: int) -> Shape:
        """Return the call by this algorithm among ranks that are each on a host of its own."""
        return Shape(
            *("all_reduce", algorithm, self.dtype, self.op, self.n_elems, rank, size),
            hosts=tuple(range(size)),
            codec=self.codec,
            rounds_own=self.codec is not Codec.IDENTITY,
            n_lanes=n_lanes,
        )

    def alone(self, rail: Rail) -> Shape:
        """Return the call by the workers alone, which fold every element as servers do."""
        return self.shape("sharded", rail.host, len(rail.members), self.n_lanes)
