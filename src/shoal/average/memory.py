"""The memory of all arrays of an averager, and values set aside during a step."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.group.buffers import BufferView
from shoal.group.memory import allocate

if TYPE_CHECKING:
    from shoal.average.layout import Layout


class ArrayMemory:
    """Memory allocated like `shoal.empty`, for any layout of the same arrays.

    `data` holds the bytes, and keeps them alive; `layout` is the current layout. `what` names the
    owner in errors. Raises ShoalError if the machine has too little memory.
    """

    def __init__(self, layout: Layout, what: str) -> None:
        self.data = allocate(layout.n_bytes, what)
        self.layout = layout
        self._begin = ctypes.addressof(self.data)
        self._aside: list[tuple[int, bytes]] = []

    def span(self, index: int) -> BufferView:
        """Return the memory of an array."""
        entry, place = self.layout.entries[index], self.layout.places[index]
        return BufferView(self._begin + place.offset, entry.n_elems, entry.dtype, self.data)

    def buffer(self, number: int) -> BufferView:
        """Return the memory of a fusion buffer."""
        buffer = self.layout.buffers[number]
        return BufferView(
            self._begin + buffer.extent.offset, buffer.n_elems, buffer.dtype, self.data
        )

    def clear(self, indices: Sequence[int]) -> None:
        """Set arrays to zero."""
        for index in indices:
            place = self.layout.places[index]
            ctypes.memset(self._begin + place.offset, 0, place.n_bytes)

    def clear_padding(self) -> None:
        """Set the padding between arrays to zero: codecs would round old values in it."""
        at = 0
        for offset, n_bytes in [*sorted(self.layout.places), (self.layout.n_bytes, 0)]:
            ctypes.memset(self._begin + at, 0, max(0, offset - at))
            at = max(at, offset + n_bytes)

    def put_aside(self, number: int, indices: Sequence[int]) -> None:
        """Save the parts of these arrays that are in a buffer, and set them to zero."""
        extent = self.layout.buffers[number].extent
        for index in indices:
            offset, n_bytes = extent.common(self.layout.places[index])
            self._aside.append((offset, ctypes.string_at(self._begin + offset, n_bytes)))
            ctypes.memset(self._begin + offset, 0, n_bytes)

    def forget_aside(self) -> None:
        """Drop the saved values, when a step is given up."""
        self._aside.clear()

    def put_back(self) -> None:
        """Restore the saved values."""
        for offset, values in self._aside:
            ctypes.memmove(self._begin + offset, values, len(values))
        self._aside.clear()
