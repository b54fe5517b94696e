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
    """Names for the averagers of a group, and the calls that dropped ones have not made.

    Attributes:
        names: numbers for names; all ranks make averagers in one order.
        dropped: the numbers of calls in steps in which an averager was dropped, to be skipped.
    """

    def __init__(self) -> None:
        self.names = itertools.count()
        self.dropped: deque[set[int]] = deque()

    def drop(self, numbers: set[int], countdown: Countdown) -> None:
        """Note that an averager is gone: its hooks count nothing any more.

        NOT skipped there and then: the garbage collector may run under the lock that this takes.
        """
        countdown.paused = True
        self.dropped.append(numbers)


_SHARED: Final[weakref.WeakKeyDictionary[Group, Shared]] = weakref.WeakKeyDictionary()


def shared_by(group: Group) -> Shared:
    """What the averagers of this group share; does not keep the group alive."""
    return _SHARED.setdefault(group, Shared())
