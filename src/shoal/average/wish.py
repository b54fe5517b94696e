"""How rank 0 asks all others for a new layout, at no cost: in a few spare bytes of a buffer.

Every rank writes zero there and rank 0 something else when it wishes; the average is not zero then,
on every rank, since all have the same bits.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from shoal.dtypes import DType

if TYPE_CHECKING:
    from shoal.average.layout import Layout

_FORMATS: Final = {
    DType.FLOAT16: "<e",
    DType.FLOAT64: "<d",
    DType.COMPLEX128: "<d",
    DType.FLOAT32: "<f",
    DType.COMPLEX64: "<f",
}


class Wish:
    """The spare bytes of one rank's memory.

    Args:
        memory: of the arrays.
        size: of the group.

    Attributes:
        buffer: they are averaged with; in a step in which that is not sent nothing is granted.
    """

    def __init__(self, memory: Any, size: int) -> None:
        self._bytes = memoryview(memory).cast("B")
        self._size = size

    def lay_out(self, layout: Layout) -> None:
        """There is another layout."""
        spare, self._made, self.buffer = layout.spare, b"", 0
        if spare is None:
            return
        self.buffer, dtype = next(
            (number, buffer.dtype)
            for number, buffer in enumerate(layout.buffers)
            if buffer.extent.common(spare).n_bytes
        )
        # As large as the average divides by: of one in a large group float16 would keep little.
        self._made = _encoded(float(self._size), dtype)
        self._at = slice(spare.offset, spare.offset + len(self._made))
        self._bytes[spare.offset : spare.end] = bytes(spare.n_bytes)

    def write(self, wishes: bool) -> None:
        """Before a step."""
        if self._made:
            self._bytes[self._at] = self._made if wishes else bytes(len(self._made))

    def is_granted(self) -> bool:
        """After a step: whether rank 0 wished for a new layout; the same on every rank."""
        return bool(self._made) and any(self._bytes[self._at])


def _encoded(value: float, dtype: DType) -> bytes:
    if dtype is DType.BFLOAT16:
        return struct.pack("<f", value)[2:]
    return struct.pack(_FORMATS[dtype], value)
