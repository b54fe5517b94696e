"""The order in which all ranks lay arrays out: that in which they came on rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.average.order import Drift, completed, packed, unpacked
from shoal.average.wish import Wish

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.average.layout import Layout
    from shoal.average.memory import ArrayMemory
    from shoal.engine import Countdown
    from shoal.group.group import Group
    from shoal.group.work import Work


class AgreedOrder:
    """Agrees on the order of the first step, and on a new one when rank 0 wishes it.

    Every rank calls everything here at the same places of a step.

    Args:
        name: of the broadcasts.
    """

    def __init__(self, group: Group, name: str, memory: ArrayMemory) -> None:
        self._group = group
        self._name = name
        self._wish: Wish | None = Wish(memory.data, group.size)
        self._drift = Drift(memory.layout) if group.rank == 0 else None
        self._is_first = True
        self._coming: tuple[Work | None, bytearray] | None = None

    def take(self) -> tuple[int, ...] | None:
        """The order that is on its way, once it is here; None if none is."""
        if self._coming is None:
            return None
        work, order = self._coming
        if work is not None:
            work.wait()
        self._coming = None
        return tuple(unpacked(order))

    def lay_out(self, layout: Layout) -> None:
        """There is another layout."""
        if self._wish is not None:
            self._wish.lay_out(layout)
        if self._drift is not None:
            self._drift.lay_out(layout)

    def keep_first(self) -> None:
        """Agree on no further one than that of the first step: what is spare is not averaged."""
        self._wish = None

    def begin(self) -> None:
        """A step begins."""
        if self._wish is not None:
            self._wish.write(self._drift is not None and self._drift.wants_new_layout)

    def end(self, layout: Layout, countdown: Countdown, is_sent: Callable[[int], bool]) -> None:
        """A step is over: send its order for the next one, where that is wanted.

        Args:
            countdown: of this step.
            is_sent: whether a buffer was averaged in it.
        """
        if self._drift is not None:
            self._drift.see(countdown.full_bytes)
        if not self._is_first and (
            self._wish is None or not is_sent(self._wish.buffer) or not self._wish.is_granted()
        ):
            return
        self._is_first = False
        if self._drift is not None:
            self._drift.was_heard()
        order = packed(completed(countdown.order, layout.order))
        self._coming = self._group.broadcast(order, 0, name=self._name, async_op=True), order
