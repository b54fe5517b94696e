"""The order in which arrays come: how ranks tell it, and when it is worth a new layout."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shoal.average.layout import Layout

# How many steps in a row must have been late before the first new layout. One step may be an
# accident (a garbage collection, a layer dropped at random); each further step costs overlap.
_FIRST_PATIENCE: Final = 2
_MOST_PATIENCE: Final = 1 << 10


def completed(order: Sequence[int], last: Sequence[int]) -> list[int]:
    """The order of arrays of which some may not have come: those last, as in the order `last`."""
    came = set(order)
    return [*order, *(index for index in last if index not in came)]


def packed(order: Sequence[int]) -> bytearray:
    """An order, to be broadcast: 4 bytes for each array."""
    return bytearray(array("I", order).tobytes())


def unpacked(data: bytes | bytearray) -> list[int]:
    """What `packed` has packed."""
    order = array("I")
    order.frombytes(data)
    return list(order)


class Drift:
    """Watches whether arrays still come in the order of the layout; on rank 0 alone.

    What changes places within about a buffer costs nothing, since buffers leave as wholes. A buffer
    that was full more than one buffer's bytes late holds up what could be hidden. When that has
    been so for some steps in a row, the order has changed; where it changes all the time, each
    further layout takes twice as many steps of patience.

    Args:
        layout: that arrays come in now.
    """

    def __init__(self, layout: Layout) -> None:
        self._patience = _FIRST_PATIENCE
        self._n_late = 0
        self.lay_out(layout)

    def lay_out(self, layout: Layout) -> None:
        """There is a new layout."""
        self._due = [
            expected + buffer.extent.n_bytes
            for expected, buffer in zip(layout.expected_bytes, layout.buffers, strict=True)
        ]
        self._n_late = 0

    def see(self, full_bytes: Sequence[int]) -> None:
        """A step is over.

        Args:
            full_bytes: by buffer: how many bytes had come when it was full; 0: it never was.
        """
        is_late = any(came > due for came, due in zip(full_bytes, self._due, strict=True))
        self._n_late = self._n_late + 1 if is_late else 0

    @property
    def wants_new_layout(self) -> bool:
        """Whether another order would serve better."""
        return self._n_late >= self._patience

    def was_heard(self) -> None:
        """A new layout is under way."""
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        self._n_late = 0
