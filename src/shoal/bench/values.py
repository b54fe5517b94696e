"""Known values: the contents of tensors before a call, and after it.

All values are integers so small that every sum is exact in any order of folds. Integers must be
right to the last bit, and floats too, except if a mean is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from shoal.bench.elements import ELEMENTS, ElementType
from shoal.codec import Codec

Values = npt.NDArray[Any]

# Filling and checking go piece by piece: temporaries as large as the tensor would raise the rank's
# peak memory.
_PIECE_ELEMS: Final = 1 << 16
# The period of the values added to pieces, so that a misplaced piece is wrong. A prime: no number
# of pieces in a chunk divides it.
_PERIOD: Final = 61
_MOST: Final = 999
# The number of ranks that contribute a factor of two to a product, which then fits every type.
_N_FACTORS: Final = 6
# A mean is a sum, which is exact, times or over the number of ranks: rounded twice at most.
_ROUNDED: Final = 2

_FOLDS: Final[Mapping[str, Any]] = {
    "sum": np.sum,
    "avg": np.sum,
    "product": np.prod,
    "min": np.min,
    "max": np.max,
}


class FilledBuffer(NamedTuple):
    """A tensor of the library, and a NumPy view of its values."""

    data: Any
    values: Values


class Contribution(NamedTuple):
    """The source of a block's values: the tensors of these ranks, from element `start` on."""

    ranks: Sequence[int]
    start: int = 0


@dataclass(frozen=True)
class KnownValues:
    """The values that each rank contributes to a call, and the values required after it.

    `codec` rounds each contribution and the result, beyond what the operation itself may round.
    """

    n_ranks: int
    element: ElementType = ELEMENTS["float32"]
    op: str = "sum"
    codec: Codec = Codec.IDENTITY

    def fill(self, values: Values, rank: int) -> None:
        """Write the known values of a rank."""
        for piece, want in self._known(len(values), Contribution([rank]), "sum"):
            values[piece] = self._encoded(want)

    def count_wrong(self, values: Values, source: Contribution) -> int:
        """Count the elements that differ from the result for filled tensors."""
        op = self.op if len(source.ranks) > 1 else "sum"
        return sum(
            self._n_wrong(values[piece], want)
            for piece, want in self._known(len(values), source, op)
        )

    @property
    def tolerance(self) -> float:
        """The relative error allowed in a value; with blocks, relative to the largest value."""
        if not self.element.is_float:
            return 0.0
        rounded = _ROUNDED * self.element.epsilon if self.op == "avg" else 0.0
        return max((1 + self.codec.error) ** 2 - 1, rounded)

    def _n_wrong(self, values: Values, want: Values) -> int:
        if not self.element.is_float:
            return int(np.count_nonzero(values != self._encoded(want)))
        held, size = self._decoded(values), np.abs(want)
        if self.codec.block > 1:
            size = size.max()
        return int(np.count_nonzero(~(np.abs(held - want) <= self.tolerance * size)))

    def _known(self, n_elems: int, source: Contribution, op: str) -> Iterator[tuple[slice, Values]]:
        """Yield the values of a block, in pieces within the pieces of the source."""
        base = _FOLDS[op]([self._base_of(rank) for rank in source.ranks], axis=0)
        n_added = len(source.ranks) if op in ("sum", "avg") else 1
        done = 0
        while done < n_elems:
            number, offset = divmod(source.start + done, _PIECE_ELEMS)
            length = min(_PIECE_ELEMS - offset, n_elems - done)
            want = base[offset : offset + length] + n_added * (number % self._period)
            if op == "avg":
                exact = want / len(source.ranks)
                want = exact if self.element.is_float else np.trunc(exact)
            yield slice(done, done + length), want
            done += length

    def _base_of(self, rank: int) -> Values:
        most = 1 + (rank < _N_FACTORS) if self.op == "product" else self._most
        kind = np.float64 if self.element.is_float else np.int64
        return np.random.default_rng(rank).integers(1, most + 1, _PIECE_ELEMS).astype(kind)

    @property
    def _room(self) -> int:
        """The largest value that one rank may contribute, so that the result is exact."""
        return self.element.exact // (self.n_ranks if self.op in ("sum", "avg") else 1)

    @property
    def _most(self) -> int:
        return min(max(self._room * 2 // 3, 1), _MOST)

    @property
    def _period(self) -> int:
        return 1 if self.op == "product" else min(max(self._room - self._most, 1), _PERIOD)

    def _encoded(self, want: Values) -> Values:
        if self.element.name == "bfloat16":  # these integers have no digits that it would cut off
            return (want.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return want.astype(self.element.storage)

    def _decoded(self, values: Values) -> Values:
        if self.element.name == "bfloat16":
            return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return values.astype(np.float64)
