"""Known values: what tensors are filled with before a call, and what must be there after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

# Filling and checking go piece by piece: temporaries as large as the tensor would be seen in the
# peak memory of the rank.
_PIECE_ELEMS: Final = 1 << 16
# Added to every piece of a tensor, so that one that lands elsewhere is wrong. A prime: no number of
# pieces in a chunk divides it.
_PERIOD: Final = 61


class FilledBuffer(NamedTuple):
    """A float32 tensor as the library takes it, and its values as NumPy sees them."""

    data: Any
    values: Floats


class Contribution(NamedTuple):
    """Where the values of a block come from: the sum of these ranks' tensors from `start` on."""

    ranks: Sequence[int]
    start: int = 0


def fill(values: Floats, rank: int) -> None:
    """Write the known values of a rank: integers, whose sums are exact in whatever order."""
    for piece, want in _known(len(values), Contribution([rank])):
        values[piece] = want


def count_wrong(values: Floats, source: Contribution, error: float = 0.0) -> int:
    """How many elements are not what ranks that were filled give at that place.

    Args:
        error: how far they may be off, as a part of it.
    """
    return sum(
        int(np.count_nonzero(~(np.abs(values[piece] - want) <= error * want)))
        for piece, want in _known(len(values), source)
    )


def _known(n_elems: int, source: Contribution) -> Iterator[tuple[slice, Floats]]:
    """The values of a block, in pieces that do not cross the borders of the source's pieces."""
    base: Floats = np.sum([_base_of(rank) for rank in source.ranks], axis=0, dtype=np.float32)
    done = 0
    while done < n_elems:
        number, offset = divmod(source.start + done, _PIECE_ELEMS)
        length = min(_PIECE_ELEMS - offset, n_elems - done)
        added = len(source.ranks) * (number % _PERIOD)
        yield slice(done, done + length), base[offset : offset + length] + added
        done += length


def _base_of(rank: int) -> Floats:
    random = np.random.default_rng(rank)
    return random.integers(1, 1000, _PIECE_ELEMS).astype(np.float32)
