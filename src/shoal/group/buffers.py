"""Buffers for calls: an address, a length, a type, and the object that keeps the memory alive."""

from __future__ import annotations

import bisect
import functools
import itertools
import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from shoal import engine
from shoal.dtypes import DType, parse_dtype
from shoal.errors import UsageError

Range = tuple[int, int]


class BufferView(NamedTuple):
    """Contiguous memory of `n_elems` elements; a call keeps `owner` alive."""

    address: int
    n_elems: int
    dtype: DType
    owner: object

    @property
    def n_bytes(self) -> int:
        return self.n_elems * self.dtype.n_bytes

    @property
    def extent(self) -> Range:
        """The first address, and the address after the last byte."""
        return self.address, self.address + self.n_bytes


_SIGNED = ((1, DType.INT8), (2, DType.INT16), (4, DType.INT32), (8, DType.INT64))
_UNSIGNED = ((1, DType.UINT8), (2, DType.UINT16), (4, DType.UINT32), (8, DType.UINT64))

# The struct module's letters and the bytes of an element: the length of "l" depends on the mark.
_LETTERS = {
    **{(letter, n_bytes): dtype for n_bytes, dtype in _SIGNED for letter in "bhilqn"},
    **{(letter, n_bytes): dtype for n_bytes, dtype in _UNSIGNED for letter in "BHILQN"},
    ("e", 2): DType.FLOAT16,
    ("f", 4): DType.FLOAT32,
    ("d", 8): DType.FLOAT64,
    ("Zf", 8): DType.COMPLEX64,
    ("Zd", 16): DType.COMPLEX128,
    ("c", 1): DType.UINT8,
    ("?", 1): DType.BOOL,
}

# The marks of this machine's byte order: NumPy sets none, JAX "=", and ctypes "<" or ">".
_NATIVE_MARKS = ("", "@", "=", "<") if sys.byteorder == "little" else ("", "@", "=", ">", "!")
_FORMATS = {
    (mark + letter, n_bytes): dtype
    for mark in _NATIVE_MARKS
    for (letter, n_bytes), dtype in _LETTERS.items()
}


LOWEST_ADDRESS: Final = 1 << 40
"""A lower address may be an offset; on Linux, addresses are usually higher."""


def lacks_memory(tensor: Any, address: int) -> bool:
    """Return True for a tensor without memory: fake, a wrapper, or with freed storage."""
    return not address or address == tensor.storage_offset() * tensor.element_size()


def span_of(data: Any, *, writable: bool = True) -> BufferView:
    """Return the memory of a BufferView, CPU tensor, NumPy array, or other object with a buffer.

    Raises:
        UsageError: it is not contiguous, is read-only but will be written, or has an unknown type.
    """
    if isinstance(data, BufferView):
        return data
    if hasattr(data, "data_ptr"):
        if not data.is_cpu:
            raise UsageError(f"{_name(data)} is on {data.device}; shoal takes CPU memory here")
        if not data.is_contiguous():
            raise UsageError(
                f"{_name(data)} is not contiguous in memory; pass tensor.contiguous(), "
                "and copy the result back"
            )
        address, n_elems = data.data_ptr(), data.numel()
        if address < LOWEST_ADDRESS and n_elems and lacks_memory(data, address):
            raise UsageError(f"{_name(data)} has no memory; pass the tensor that holds its values")
        return BufferView(address, n_elems, _dtype_of_tensor(data.dtype), data)
    view, dtype = _view_of(data)
    if not view.c_contiguous:
        raise UsageError(_not_contiguous(data, view))
    if view.readonly and writable:
        raise UsageError(f"{_name(data)} is read-only, and this call writes to it")
    return BufferView(engine.address_of(view), view.nbytes // view.itemsize, dtype, view)


_dtype_of_tensor = functools.lru_cache(maxsize=64)(parse_dtype)  # its name takes long to print


def _view_of(data: Any) -> tuple[memoryview, DType]:
    try:
        view = memoryview(data)
    except TypeError:
        raise UsageError(
            f"{_name(data)} has no buffer; pass a NumPy array, a tensor, a bytearray or a "
            "BufferView"
        ) from None
    except (ValueError, BufferError) as error:  # NumPy, JAX: its format has no letter
        return _view_without_letter(data, error), DType.BFLOAT16
    dtype = _FORMATS.get((view.format, view.itemsize))
    if dtype is None:
        raise UsageError(
            f"{_name(data)} has elements of format {view.format!r}, which shoal does not know; "
            "convert it first, foreign byte orders too"
        )
    return view, dtype


def _view_without_letter(data: Any, error: Exception) -> memoryview:
    """Return the memory of an array of bfloat16, for which the buffer protocol has no format."""
    dtype = getattr(data, "dtype", None)
    if dtype is None:
        raise UsageError(f"{_name(data)} gives no buffer: {error}") from error
    if str(dtype) != "bfloat16":
        raise UsageError(f"{_name(data)} has elements of {dtype}, which shoal does not know")
    if not hasattr(data, "__array_interface__"):
        raise UsageError(f"{_name(data)} has no buffer of bfloat16; pass numpy.asarray(array)")
    return memoryview(data.view("uint16"))


def _not_contiguous(data: Any, view: memoryview) -> str:
    # NOT used in its own order: arrays of other ranks may have another order.
    if view.f_contiguous:
        return (
            f"{_name(data)} is in Fortran order; pass array.T, on every rank, which is the same "
            "memory in C order, or numpy.ascontiguousarray(array)"
        )
    return (
        f"{_name(data)} is not contiguous in memory; pass numpy.ascontiguousarray(array), "
        "and copy the result back"
    )


class BlockBuffers(NamedTuple):
    """One block of memory for every rank, in rank order; `lengths` counts each block's elements.

    `spans` has one buffer for each rank, or one over all blocks if they have the same length.
    """

    spans: Sequence[BufferView]
    lengths: tuple[int, ...]

    @property
    def even(self) -> bool:
        """True if all blocks have the same length."""
        return self.lengths.count(self.lengths[0]) == len(self.lengths)

    def block(self, rank: int) -> BufferView:
        """Return the memory of one block."""
        if len(self.spans) == len(self.lengths):
            return self.spans[rank]
        whole, n_elems = self.spans[0], self.lengths[rank]
        offset = rank * n_elems * whole.dtype.n_bytes
        return BufferView(whole.address + offset, n_elems, whole.dtype, whole.owner)

    def ranges(self) -> list[Range]:
        """Return the `extent` of each block."""
        if len(self.spans) == len(self.lengths):
            return [span.extent for span in self.spans]
        whole, size = self.spans[0], len(self.lengths)
        step = whole.n_bytes // size
        ends = [whole.address + step * rank for rank in range(size + 1)]
        return list(itertools.pairwise(ends))


def blocks_of(given: Any, size: int, *, writable: bool) -> BlockBuffers:
    """Return the blocks of `size` ranks from one buffer, or from a list or tuple of buffers.

    Raises:
        UsageError: see `span_of`; or the buffer cannot be cut evenly, the list does not have a
            buffer for each rank, or types differ.
    """
    if isinstance(given, BufferView) or not isinstance(given, list | tuple):
        whole = span_of(given, writable=writable)
        if whole.n_elems % size != 0:
            raise UsageError(
                f"{whole.dtype}[{whole.n_elems}] cannot be cut into one block for each of {size} "
                "ranks; pass a list of buffers where their lengths differ"
            )
        return BlockBuffers((whole,), (whole.n_elems // size,) * size)
    spans = [span_of(each, writable=writable) for each in given]
    if len(spans) != size:
        raise UsageError(f"got {len(spans)} buffers; give {size}, one for each rank")
    for rank, span in enumerate(spans):
        if span.dtype is not spans[0].dtype:
            raise UsageError(
                f"{span.dtype}[{span.n_elems}] for rank {rank} among buffers of {spans[0].dtype}"
            )
    return BlockBuffers(spans, tuple(span.n_elems for span in spans))


def clash(written: Sequence[Range], read: Sequence[Range]) -> tuple[int, int, bool] | None:
    """Return the first written range that overlaps another range; None if there is none.

    Returns: its index, the index of the other range, and True if that one is written too.
    """
    order = sorted((begin, end, at) for at, (begin, end) in enumerate(written) if begin < end)
    for (_, end, one), (begin, _, other) in itertools.pairwise(order):
        if begin < end:
            return one, other, True
    for at, (begin, end) in enumerate(read):
        # The last written range that begins before this one ends. Written ranges are disjoint, so
        # no earlier one can reach into this range unless this last one does too.
        before = bisect.bisect_left(order, (end,)) - 1
        if begin < end and before >= 0 and order[before][1] > begin:
            return order[before][2], at, False
    return None


def _name(data: object) -> str:
    shape = getattr(data, "shape", None)
    return type(data).__name__ + (f" of shape {tuple(shape)}" if shape is not None else "")
