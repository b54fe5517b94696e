"""The numbers of a group's calls without names: by them the calls of all ranks match."""

from __future__ import annotations

import math
import operator
import threading
from typing import Final

from shoal.errors import UsageError
from shoal.limits import CALLS_REMEMBERED

# How far calls may be out of order. A rank takes what it hears of a call for late news of one that
# is over if it has made one `CALLS_REMEMBERED` numbers higher. Half of that is plenty, and leaves
# room for what two ranks can be from a third.
MOST_APART: Final = CALLS_REMEMBERED // 2
MOST_OPEN: Final = 2 * MOST_APART
"""Numbers that are reserved and neither used nor skipped: the upper half may not be used yet."""


class Numbers:
    """One rank's numbers in one group: in program order, but for those that were reserved.

    Args:
        where: whose they are, for messages.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._lock = threading.Lock()
        self._next = 1
        self._open: dict[int, None] = {}  # reserved ones that may yet be used, in their order
        self._last = math.inf  # the highest that may be used, because of the lowest of these

    def take(self) -> int:
        """The next one that nobody has reserved.

        Raises:
            UsageError: it is too far from one that was reserved; it was not taken.
        """
        with self._lock:
            number = self._next
            if number > self._last:
                self._refuse(number)
            self._next = number + 1
            return number

    def reserve(self, count: int) -> range:
        """The next `count`, to be used later in any order.

        Raises:
            UsageError: that is no count, or more than may be out of order, or too many that were
                reserved before are open.
        """
        try:
            n = operator.index(count)
        except TypeError:
            raise UsageError(f"{self._where}: reserve({count!r}): give a whole number") from None
        if not 0 <= n <= MOST_APART:
            raise UsageError(
                f"{self._where}: reserve({n}): from 0 to {MOST_APART} numbers can be reserved "
                "at once, since calls may be so far out of order; reserve more when some are used"
            )
        with self._lock:
            if len(self._open) + n > MOST_OPEN:
                raise UsageError(
                    f"{self._where}: reserve({n}), and {len(self._open)} numbers that were "
                    "reserved before are neither used nor skipped, of at most "
                    f"{MOST_OPEN}; use or skip some first"
                )
            numbers = range(self._next, self._next + n)
            self._next += n
            self._open.update(dict.fromkeys(numbers))
            self._look()
            return numbers

    def use(self, number: int) -> int:
        """Use one that was reserved; returns it.

        Raises:
            UsageError: it was not reserved, or it is used or skipped already, or too far from
                another that is open. It is as before.
        """
        with self._lock:
            self._check(number, "use")
            if number > self._last:
                self._refuse(number)
            self._let_go(number)
            return number

    def skip(self, number: int) -> None:
        """No call will have it. Raises UsageError if it was not reserved, or not any more."""
        with self._lock:
            self._check(number, "skip")
            self._let_go(number)

    def is_open(self, number: int) -> bool:
        """Whether a call may yet have it: it is reserved, or has not come."""
        with self._lock:
            return number >= self._next or number in self._open

    def lowest_open(self) -> int:
        """The lowest that a call may yet have."""
        with self._lock:
            return next(iter(self._open), self._next)

    def _check(self, number: object, what: str) -> None:
        if isinstance(number, int) and number in self._open:
            return
        is_past = isinstance(number, int) and 0 < number < self._next
        was = "it was used or skipped before" if is_past else "nobody has reserved it"
        raise UsageError(
            f"{self._where}: cannot {what} number {number!r}: {was}; each that `reserve` returns "
            "is good for one call"
        )

    def _let_go(self, number: int) -> None:
        del self._open[number]
        self._look()

    def _look(self) -> None:
        lowest = next(iter(self._open), None)
        self._last = math.inf if lowest is None else lowest + MOST_APART

    def _refuse(self, number: int) -> None:
        lowest = next(iter(self._open))
        raise UsageError(
            f"{self._where}: call {number} is more than {MOST_APART} after number {lowest}, which "
            "was reserved and neither used nor skipped; use or skip it first"
        )
