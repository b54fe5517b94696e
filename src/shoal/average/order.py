"""The order in which arrays came in the first step on rank 0, which all ranks take."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shoal.group.group import Group
    from shoal.group.work import Work


class FirstOrder:
    """Broadcasts the order of the first step; every rank calls it at the same places of a step.

    Args:
        name: of the broadcast.
    """

    def __init__(self, group: Group, name: str) -> None:
        self._group = group
        self._name = name
        self._is_sent = False
        self._coming: tuple[Work | None, bytearray] | None = None

    def end_step(self, came: Sequence[int], last: Sequence[int]) -> None:
        """Send the order of arrays after the first step, which is over; then do nothing.

        Args:
            came: the arrays in the order in which they came.
            last: all arrays; those that did not come follow in this order.
        """
        if self._is_sent:
            return
        self._is_sent = True
        missing = set(last).difference(came)
        order = bytearray(array("I", [*came, *(one for one in last if one in missing)]).tobytes())
        self._coming = self._group.broadcast(order, 0, name=self._name, async_op=True), order

    def take(self) -> tuple[int, ...] | None:
        """Return the order once, after the step that sent it; waits until it has come."""
        if self._coming is None:
            return None
        work, data = self._coming
        if work is not None:
            work.wait()
        self._coming = None
        order = array("I")
        order.frombytes(data)
        return tuple(order)
