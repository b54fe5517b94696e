"""Where each array lies in the fusion buffers. Pure: equal inputs give the same layout.

All arrays of one element type are laid out one after the other, in the expected order, and cut into
buffers of equal length. Only the last buffer may be shorter, or longer by padding. So an array may
span two or more buffers, and every reducer has an equal share of every buffer.

Source: Thangakrishnan et al., "Herring", SC 2020, III-1 and III-2.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from shoal.dtypes import DType, parse_dtype
from shoal.errors import UsageError

ALIGN_BYTES: Final = 64
"""Arrays and buffers begin at multiples of it: a cache line, and whole elements of every type."""

# Ranks of one host read a buffer in place, except for a segment that shares a page with another
# buffer, which is copied: 4 % of 34 MiB in 16 buffers. Short buffers would grow by more than that.
_PAGE_BYTES: Final = 4096
_PAGED_FROM: Final = 16 * _PAGE_BYTES

# A last buffer shorter than this part of the others is distributed over them.
_LONGER: Final = 1 / 16

# The last floating-point type ends with padding. NOT removed: the length of a buffer decides the
# order in which its elements are summed, and so the bits of averages.
_TAIL_BYTES: Final = ALIGN_BYTES

FLOATS: Final = frozenset(
    dtype for dtype in DType if dtype.name.startswith(("FLOAT", "BFLOAT", "COMPLEX"))
)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array to be averaged: its name, shape, element type and length."""

    name: str
    shape: tuple[int, ...]
    dtype: DType
    n_elems: int = field(init=False)
    n_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        n_elems = math.prod(self.shape)
        object.__setattr__(self, "n_elems", n_elems)
        object.__setattr__(self, "n_bytes", n_elems * self.dtype.n_bytes)

    @classmethod
    def of(cls, name: str, given: Any) -> ArraySpec:
        """Describe an array: a (shape, dtype) pair, or an object with both; else UsageError."""
        try:
            shape, dtype = (given.shape, given.dtype) if hasattr(given, "shape") else given
            sizes = (shape,) if isinstance(shape, int) else tuple(int(size) for size in shape)
        except (TypeError, ValueError):
            raise UsageError(
                f"{name!r} is {given!r}; pass a shape and a dtype, or an array"
            ) from None
        try:
            return cls(str(name), sizes, parse_dtype(dtype))
        except UsageError as error:
            raise UsageError(f"{name!r}: {error}") from None

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype}{list(self.shape)}"


class Extent(NamedTuple):
    """A part of the memory: bytes [offset, offset + n_bytes)."""

    offset: int
    n_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.n_bytes

    def common(self, other: Extent) -> Extent:
        """Return the bytes that are in both; of length 0 if there are none."""
        offset = max(self.offset, other.offset)
        return Extent(offset, max(0, min(self.end, other.end) - offset))


class FusionBuffer(NamedTuple):
    """One piece of the flattened arrays, averaged by one call.

    `entries` are the indices of the arrays that have a part in it, in their order.
    """

    dtype: DType
    extent: Extent
    entries: tuple[int, ...]

    @property
    def n_elems(self) -> int:
        """The number of elements, including padding between arrays."""
        return self.extent.n_bytes // self.dtype.n_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """The places of arrays in one piece of memory, and the buffers that it is cut into.

    Args:
        entries: the arrays; an *index* is an index into this tuple.
        order: the indices, in the order in which the arrays are expected.
        places: the place of each array, by index.
        buffers: in the order in which they become full if arrays become ready in `order`.
        buffers_of: by index, the numbers of the buffers that count an array.
        n_bytes: the length of the memory; the same for every order.
    """

    entries: tuple[ArraySpec, ...]
    order: tuple[int, ...]
    places: tuple[Extent, ...]
    buffers: tuple[FusionBuffer, ...]
    buffers_of: tuple[tuple[int, ...], ...]
    n_bytes: int

    @staticmethod
    def of(entries: Sequence[ArraySpec], order: Sequence[int], fusion_bytes: int) -> Layout:
        """Lay arrays out.

        Args:
            order: every index once.
            fusion_bytes: the maximum length of a buffer, without rounding up to whole pages,
                padding, and a sixteenth more if that saves a buffer.

        Raises:
            UsageError: there are no arrays, two have one name, a shape has a negative dimension,
                `order` is not a permutation, or buffers would be shorter than `ALIGN_BYTES`.
        """
        _check(entries, order, fusion_bytes)
        return _Maker(entries, order, fusion_bytes).layout()

    def part(self, buffer: int, index: int) -> slice:
        """Return the elements of a buffer that belong to an array."""
        dtype, whole, _ = self.buffers[buffer]
        part, size = whole.common(self.places[index]), dtype.n_bytes
        return slice((part.offset - whole.offset) // size, (part.end - whole.offset) // size)


def _check(entries: Sequence[ArraySpec], order: Sequence[int], fusion_bytes: int) -> None:
    if not entries:
        raise UsageError("there is nothing to average: name at least one array")
    names: set[str] = set()
    for entry in entries:
        if entry.name in names:
            raise UsageError(f"{entry.name!r} is named twice; every array needs its own name")
        names.add(entry.name)
        if min(entry.shape, default=0) < 0:
            raise UsageError(f"{entry} has a negative dimension")
    if sorted(order) != list(range(len(entries))):
        raise UsageError(f"an order of {len(entries)} arrays must name each of them once")
    if fusion_bytes < ALIGN_BYTES:
        raise UsageError(f"fusion_bytes must be at least {ALIGN_BYTES}, got {fusion_bytes}")


def _aligned(n_bytes: int, to: int = ALIGN_BYTES) -> int:
    return -(-n_bytes // to) * to


class _Maker:
    """Lays out the arrays of each type, and numbers all buffers in the order of becoming full."""

    def __init__(
        self, entries: Sequence[ArraySpec], order: Sequence[int], fusion_bytes: int
    ) -> None:
        self._entries = tuple(entries)
        self._order = tuple(order)
        self._fusion_bytes = fusion_bytes
        self._places: dict[int, Extent] = {}

    def layout(self) -> Layout:
        types = list(dict.fromkeys(self._entries[index].dtype for index in self._order))
        tail_type = next((dtype for dtype in reversed(types) if dtype in FLOATS), None)
        made: list[tuple[int, FusionBuffer]] = []
        at = 0
        # Types whose buffers begin at pages come first, so that other types do not move them.
        for dtype in sorted(types, key=lambda one: not self._is_paged(one)):
            tail = _TAIL_BYTES if dtype is tail_type else 0
            begin, end = at, self._place(dtype, at)
            at = end + tail
            if len(types) > 1 and self._is_paged(dtype):
                # The same memory for every order, although the order decides which type has a tail.
                at = _aligned(end + _TAIL_BYTES * (dtype in FLOATS), _PAGE_BYTES)
            made += self._cut(dtype, Extent(begin, end - begin), at)
        if len(types) > 1 and tail_type is not None and self._is_paged(tail_type):
            at += _TAIL_BYTES
        made.sort(key=lambda pair: pair[0])  # stable: buffers of one array stay in their order
        buffers = tuple(buffer for _, buffer in made)
        places = tuple(self._places[index] for index in range(len(self._entries)))
        return Layout(
            *(self._entries, self._order, places, buffers),
            buffers_of=self._buffers_of(buffers),
            n_bytes=at,
        )

    def _is_paged(self, dtype: DType) -> bool:
        """Return True if a type is long enough to begin at a page; the same for every order."""
        return sum(one.n_bytes for one in self._entries if one.dtype is dtype) >= _PAGED_FROM

    def _place(self, dtype: DType, at: int) -> int:
        """Lay out all arrays of a type at `at` and after; return where they end."""
        for index in self._order:
            entry = self._entries[index]
            if entry.dtype is dtype:
                self._places[index] = Extent(at, entry.n_bytes)
                at += _aligned(entry.n_bytes)
        return at

    def _cut(self, dtype: DType, arrays: Extent, upto: int) -> Iterator[tuple[int, FusionBuffer]]:
        """Yield the buffers of a type, each with its place in the order of becoming full.

        Args:
            arrays: the extent of all arrays of this type.
            upto: the end of the last buffer, including padding, because a page shared with another
                buffer would be copied.
        """
        if upto == arrays.offset:  # there are only arrays without elements
            return
        # NOT with the tail: each array as long as a buffer would span two buffers, and wait for the
        # next array.
        length = self._length(max(arrays.n_bytes, ALIGN_BYTES))
        inside = [
            (when, index)
            for when, index in enumerate(self._order, 1)
            if self._entries[index].dtype is dtype and self._places[index].n_bytes
        ]
        begins = [self._places[index].offset for _, index in inside]
        for offset in range(arrays.offset, max(arrays.end, arrays.offset + 1), length):
            is_last = arrays.end - offset <= length
            extent = Extent(offset, upto - offset if is_last else length)
            # The first array in the buffer is the last that begins at or before its begin.
            first = max(0, bisect.bisect_right(begins, extent.offset) - 1)
            last = bisect.bisect_left(begins, extent.end)
            held = [
                pair for pair in inside[first:last] if self._places[pair[1]].end > extent.offset
            ]
            when = held[-1][0] if held else len(self._order)
            yield when, FusionBuffer(dtype, extent, tuple(index for _, index in held))

    def _length(self, n_bytes: int) -> int:
        """Return the length of all buffers of a type except the last."""
        n_buffers = -(-n_bytes // self._fusion_bytes)
        rest = n_bytes - (n_buffers - 1) * self._fusion_bytes
        if n_buffers > 1 and rest <= self._fusion_bytes * _LONGER:  # no buffer for mere padding
            n_buffers -= 1
        length = _aligned(-(-n_bytes // n_buffers))
        return _aligned(length, _PAGE_BYTES) if length >= _PAGED_FROM else length

    def _buffers_of(self, buffers: Sequence[FusionBuffer]) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self._entries]
        for number, buffer in enumerate(buffers):
            # A buffer with only padding is sent with the last array.
            for index in buffer.entries or self._order[-1:]:
                found[index].append(number)
        return tuple(map(tuple, found))
