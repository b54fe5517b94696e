"""When a join that gets nowhere looks again, and when it says so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from shoal.rendezvous.options import JoinOptions


# When nothing moves, a rank looks around in the store: some leftovers show in no other way. At
# first after the time that most joins take altogether, then less and less often.
_FIRST_S: Final = 0.02
_LONGEST_S: Final = 1.0
_PER_RANK_S: Final = 0.002  # so that a large group does not flood its store
_QUICKEST_S: Final = 0.005  # a stranger's HELLO must not make us flood the store


class Rereading:
    """When to look around in the store again.

    Args:
        size: of the group.
    """

    def __init__(self, size: int) -> None:
        self.at = 0.0
        self._wait_s = _FIRST_S
        # Who is alone has no use for a store.
        self._per_group_s = size * _PER_RANK_S if size > 1 else float("inf")
        self._last = 0.0

    def plan(self, now: float) -> None:
        """It is done now: once more after twice the time."""
        self.at = now + self._wait_s + self._per_group_s
        self._wait_s = min(2 * self._wait_s, _LONGEST_S)

    def start_anew(self, now: float) -> None:
        """Something has moved."""
        self._wait_s = _FIRST_S
        self.plan(now)

    def soon(self, now: float) -> None:
        """There is reason to."""
        self._wait_s = _FIRST_S
        self.at = min(self.at, now + _FIRST_S)

    def may_be_now(self, now: float) -> bool:
        """Whether it is long enough ago that somebody made us look."""
        if now - self._last < _QUICKEST_S:
            return False
        self._last = now
        return True


class Warnings:
    """What a join warns of, at doubling intervals.

    Args:
        explain: by a verdict and how the store is silent, what is lacking.
    """

    def __init__(self, options: JoinOptions, explain: Callable[[str, str], str]) -> None:
        self._options = options
        self._explain = explain
        self._started = time.monotonic()
        self._after_s = options.warn_s  # the next time
        self._has_told_of_one_gone = False

    @property
    def elapsed_s(self) -> float:
        """Since the join began."""
        return time.monotonic() - self._started

    def warn_if_due(self, silence: str) -> float:
        """Say what is lacking; returns when to say it again."""
        if self.elapsed_s >= self._after_s:
            verdict = f"has not joined after {self._after_s:g} s"
            self._after_s *= 2  # NOT later: to ask the store may take until then
            self._options.log.warning("%s", self._explain(verdict, silence))
        return self._started + self._after_s

    def warn_that_one_is_gone(self, now: float) -> None:
        """Say at an early time, once, that a rank has failed before we came."""
        waited_s = now - self._started
        if waited_s >= self._options.gone_s and not self._has_told_of_one_gone:
            self._has_told_of_one_gone = True
            verdict = f"waits for a rank, {waited_s:.3g} s so far"
            self._options.log.warning("%s", self._explain(verdict, ""))
