"""What the averagers of a group share."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shoal.engine import Countdown
    from shoal.group.group import Group


class Shared:
    """Names for the averagers of a group, and what those have left that are gone.

    Attributes:
        names: all ranks make averagers in one order.
        dropped: the numbers of steps in which one was dropped, to be skipped.
    """

    def __init__(self) -> None:
        self.names = itertools.count()
        self.dropped: deque[set[int]] = deque()

    def drop(self, numbers: set[int], countdown: Countdown) -> None:
        """An averager is gone: its hooks, if anybody keeps one, count nothing any more.

        NOT skipped there and then: whoever collects garbage may hold the lock that this takes.
        """
        countdown.paused = True
        self.dropped.append(numbers)


_SHARED: Final[weakref.WeakKeyDictionary[Group, Shared]] = weakref.WeakKeyDictionary()


def shared_by(group: Group) -> Shared:
    """What the averagers of this group share; has no hold on the group."""
    return _SHARED.setdefault(group, Shared())
