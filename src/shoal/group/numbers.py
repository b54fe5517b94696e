"""The numbers of a group's unnamed calls, by which calls of different ranks match."""

from __future__ import annotations

import operator
import sys
import threading
from typing import Final

from shoal.errors import UsageError
from shoal.limits import CALLS_REMEMBERED

# Calls may be this far out of order. A rank treats a message as a late one of an ended call if it
# has made a call with a number higher by `CALLS_REMEMBERED`. Half of that leaves room for the
# distance between two ranks.
MOST_APART: Final = CALLS_REMEMBERED // 2
MOST_OPEN: Final = 2 * MOST_APART
"""The most open numbers: reserved, and neither used nor skipped. Only the lower half is usable."""


class Numbers:
    """One rank's numbers in the group `where`, in program order except for reserved numbers."""

    __slots__ = ("_last", "_lock", "_next", "_open", "_where")

    def __init__(self, where: str) -> None:
        self._where = where
        self._lock = threading.Lock()
        self._next = 1
        self._open: dict[int, None] = {}  # reserved and not yet used, in order
        self._last = sys.maxsize  # the highest usable number, `MOST_APART` after the lowest open

    def take(self) -> int:
        """Return the next unreserved number; UsageError if an open reserved one is too far back."""
        with self._lock:
            number = self._next
            if number > self._last:
                self._refuse(number)
            self._next = number + 1
            return number

    def reserve(self, count: int) -> range:
        """Return the next `count` numbers, to use in any order; UsageError for too many."""
        try:
            n = operator.index(count)
        except TypeError:
            raise UsageError(f"{self._where}: reserve({count!r}): give a whole number") from None
        if not 0 <= n <= MOST_APART:
            raise UsageError(
                f"{self._where}: reserve({n}): from 0 to {MOST_APART} numbers can be reserved "
                "at once, the most that calls may be out of order; reserve more when some are used"
            )
        with self._lock:
            if len(self._open) + n > MOST_OPEN:
                raise UsageError(
                    f"{self._where}: reserve({n}), but {len(self._open)} of at most {MOST_OPEN} "
                    "reserved numbers are neither used nor skipped; use or skip some first"
                )
            numbers = range(self._next, self._next + n)
            self._next += n
            self._open.update(dict.fromkeys(numbers))
            self._look()
            return numbers

    def use(self, number: int) -> int:
        """Use a reserved number and return it; UsageError if it is not open, or too far ahead."""
        with self._lock:
            self._check(number, "use")
            if number > self._last:
                self._refuse(number)
            self._let_go(number)
            return number

    def skip(self, number: int) -> None:
        """Give up a reserved number. Raises UsageError if it is not open."""
        with self._lock:
            self._check(number, "skip")
            self._let_go(number)

    def is_open(self, number: int) -> bool:
        """Return True if a call may still have this number."""
        with self._lock:
            return number >= self._next or number in self._open

    def lowest_open(self) -> int:
        """Return the lowest number that a call may still have."""
        with self._lock:
            return next(iter(self._open), self._next)

    def _check(self, number: object, what: str) -> None:
        if isinstance(number, int) and number in self._open:
            return
        is_past = isinstance(number, int) and 0 < number < self._next
        was = "it was used or skipped before" if is_past else "it is not reserved"
        raise UsageError(
            f"{self._where}: cannot {what} number {number!r}: {was}; each number from `reserve` "
            "is for one call"
        )

    def _let_go(self, number: int) -> None:
        del self._open[number]
        self._look()

    def _look(self) -> None:
        lowest = next(iter(self._open), None)
        self._last = sys.maxsize if lowest is None else lowest + MOST_APART

    def _refuse(self, number: int) -> None:
        lowest = next(iter(self._open))
        raise UsageError(
            f"{self._where}: call {number} is more than {MOST_APART} after the reserved number "
            f"{lowest}, which is neither used nor skipped; use or skip it first"
        )
