"""Flags that notify the ranks of a group when enough of them are ready for a round."""

from __future__ import annotations

import time
from array import array
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from shoal.group.group import Group
    from shoal.group.work import Work

_NEVER_S: Final = 1e9  # a flag may arrive at any time; the end of the group ends the wait


class ReadyFlags:
    """Sends every other rank the number of the round that this rank is ready for. Never waits.

    Args:
        quorum: the number of ready ranks that opens a round.
        grace: seconds that an open round waits for the other ranks.
    """

    def __init__(self, group: Group, quorum: int, grace: float) -> None:
        # A separate group, so that reports of late ranks do not name flags that no rank waits for.
        self._group = group.subgroup(range(group.size), "ready flags")
        self._quorum = min(quorum, group.size)
        self._grace = grace
        self._latest = dict.fromkeys(range(group.size), -1)
        self._coming: dict[int, tuple[Work, array[int]]] = {}
        self._opened = (-1, 0.0)
        for rank in self._latest.keys() - {group.rank}:
            self._listen_to(rank)

    def announce(self, number: int) -> None:
        """Send the other ranks the number of the round that this rank is ready for, once."""
        if self._latest[self._group.rank] >= number:
            return
        self._latest[self._group.rank] = number
        for rank in self._coming:
            self._group.send(array("q", [number]), rank, async_op=True)

    def is_open(self, number: int) -> bool:
        """Return True if a quorum is ready and the grace is over; ShoalError if the group ended."""
        for rank, (work, flag) in list(self._coming.items()):
            if work.done():
                work.wait()  # raises its error
                self._latest[rank] = flag[0]
                self._listen_to(rank)
        latest = self._latest.values()
        n_ready = sum(one >= number for one in latest)
        if n_ready < self._quorum:
            return False
        if self._opened[0] != number:
            self._opened = (number, time.monotonic())
        is_late = time.monotonic() - self._opened[1] >= self._grace
        return n_ready == len(latest) or max(latest) > number or is_late

    def close(self) -> None:
        """Stop listening."""
        self._group.close()

    def _listen_to(self, rank: int) -> None:
        flag = array("q", [-1])
        work = self._group.recv(flag, rank, async_op=True, timeout_s=_NEVER_S)
        self._coming[rank] = cast("Work", work), flag
