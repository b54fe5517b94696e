"""Memory as shoal takes it: an address, a length and a type, and who keeps it alive."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from shoal import engine
from shoal.dtypes import DType, item_size, parse_dtype
from shoal.errors import UsageError


class Span(NamedTuple):
    """Contiguous memory of `n_elems` elements; `owner` is kept alive while a call uses it."""

    address: int
    n_elems: int
    dtype: DType
    owner: object

    @property
    def n_bytes(self) -> int:
        """Its length in bytes."""
        return self.n_elems * item_size(self.dtype)


# The struct module's letters: native size and order.
_FORMATS = {
    "f": DType.FLOAT32,
    "d": DType.FLOAT64,
    "e": DType.FLOAT16,
    "b": DType.INT8,
    "h": DType.INT16,
    "i": DType.INT32,
    "l": DType.INT64,
    "q": DType.INT64,
    "B": DType.UINT8,
    "c": DType.UINT8,
    "H": DType.UINT16,
    "I": DType.UINT32,
    "L": DType.UINT64,
    "Q": DType.UINT64,
    "?": DType.BOOL,
    "Zf": DType.COMPLEX64,
    "Zd": DType.COMPLEX128,
}


def span_of(data: Any, *, writable: bool = True) -> Span:
    """The memory of `data`: a Span, a CPU torch tensor, a NumPy array, or anything with a buffer.

    Raises:
        UsageError: not contiguous, read-only where it will be written, or of a type that shoal
            does not know.
    """
    if isinstance(data, Span):
        return data
    if hasattr(data, "data_ptr"):
        if data.device.type != "cpu":
            raise UsageError(f"{_name(data)} is on {data.device}; shoal takes CPU memory here")
        if not data.is_contiguous():
            raise UsageError(f"{_name(data)} is not contiguous in memory; pass a contiguous copy")
        return Span(data.data_ptr(), data.numel(), parse_dtype(data.dtype), data)
    try:
        view = memoryview(data)
    except TypeError:
        raise UsageError(
            f"{_name(data)} has no buffer; pass a NumPy array, a tensor, a bytearray or a Span"
        ) from None
    except ValueError:  # NumPy: its format has no letter
        raise UsageError(f"{_name(data)} has elements that shoal does not know") from None
    dtype = _FORMATS.get(view.format)
    if dtype is None:
        raise UsageError(
            f"{_name(data)} has elements of format {view.format!r}, which shoal does not know; "
            "convert it first, foreign byte orders too"
        )
    if not view.c_contiguous:
        raise UsageError(f"{_name(data)} is not contiguous in memory; pass a contiguous copy")
    if view.readonly and writable:
        raise UsageError(f"{_name(data)} is read-only, and this call writes to it")
    return Span(engine.address_of(view), view.nbytes // item_size(dtype), dtype, view)


class Blocks(NamedTuple):
    """One block of memory for every rank, in rank order.

    Args:
        spans: one over all blocks, which are then of equal length, or one for each rank.
        lengths: elements of each block.
    """

    spans: Sequence[Span]
    lengths: tuple[int, ...]

    @property
    def even(self) -> bool:
        """Whether all blocks are of one length."""
        return self.lengths.count(self.lengths[0]) == len(self.lengths)

    def block(self, rank: int) -> Span:
        """The memory of one block."""
        if len(self.spans) == len(self.lengths):
            return self.spans[rank]
        whole, n_elems = self.spans[0], self.lengths[rank]
        offset = rank * n_elems * item_size(whole.dtype)
        return Span(whole.address + offset, n_elems, whole.dtype, whole.owner)

    def ranges(self) -> list[_Range]:
        """Where each block begins and ends."""
        if len(self.spans) == len(self.lengths):
            return [(span.address, span.address + span.n_bytes) for span in self.spans]
        whole, size = self.spans[0], len(self.lengths)
        step = whole.n_bytes // size
        ends = [whole.address + step * rank for rank in range(size + 1)]
        return list(itertools.pairwise(ends))


_Range = tuple[int, int]


def blocks_of(given: Any, size: int, *, writable: bool) -> Blocks:
    """The blocks of `size` ranks: cut from one buffer, or a list or tuple of one for each.

    Raises:
        UsageError: as `span_of` does; or the buffer cannot be cut evenly, there is not one buffer
            for each rank, or their types differ.
    """
    if isinstance(given, Span) or not isinstance(given, list | tuple):
        whole = span_of(given, writable=writable)
        if whole.n_elems % size != 0:
            raise UsageError(
                f"{whole.dtype}[{whole.n_elems}] cannot be cut into one block for each of {size} "
                "ranks; pass a list of buffers where their lengths differ"
            )
        return Blocks((whole,), (whole.n_elems // size,) * size)
    spans = [span_of(each, writable=writable) for each in given]
    if len(spans) != size:
        raise UsageError(f"{len(spans)} buffers; one for each rank, {size}, needed")
    for rank, span in enumerate(spans):
        if span.dtype is not spans[0].dtype:
            raise UsageError(
                f"{span.dtype}[{span.n_elems}] for rank {rank} among buffers of {spans[0].dtype}"
            )
    return Blocks(spans, tuple(span.n_elems for span in spans))


def clash(written: Sequence[_Range], read: Sequence[_Range]) -> tuple[int, int, bool] | None:
    """The first two ranges that overlap, of which at least one is written; None if there are none.

    Returns:
        The index of the written one, the index of the other, and whether that is written too.
    """
    order = sorted((begin, end, at) for at, (begin, end) in enumerate(written) if begin < end)
    for (_, end, one), (begin, _, other) in itertools.pairwise(order):
        if begin < end:
            return one, other, True
    for at, (begin, end) in enumerate(read):
        # The last written range that begins before this one ends: no other could reach into it
        # without overlapping that.
        before = bisect.bisect_left(order, (end,)) - 1
        if begin < end and before >= 0 and order[before][1] > begin:
            return order[before][2], at, False
    return None


def _name(data: object) -> str:
    shape = getattr(data, "shape", None)
    return type(data).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
