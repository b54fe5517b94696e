"""What becomes of the calls of a view that ends, from how each stands on each worker. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import NamedTuple

from shoal.errors import UsageError


class Standing(IntEnum):
    """How a call stands on one worker."""

    UNMADE = 0  # it may yet come
    OPEN = 1  # it was made; its servers have not ended it, and never will
    WHOLE = 2  # it has ended well, so all workers hold all of it
    OTHER = 3  # its number was skipped, or went to a call in which servers have no part


class Settlement(NamedTuple):
    """What the workers agree on.

    Args:
        whole: calls that are open on some worker and whole on another.
        left: those that are mended by the workers, each once all have made it. All others are
            over, or nobody has made them yet.
    """

    whole: Collection[int]
    left: Sequence[int]


class NumbersDiffer(UsageError):  # noqa: N818 - says what is wrong
    """A number was used by some workers and not by others."""


def settle(first: int, told: Sequence[bytes]) -> Settlement:
    """What becomes of calls; the same on every worker.

    Args:
        first: the number of the first of them.
        told: by worker, a `Standing` for each call.

    Raises:
        NumbersDiffer: some workers use a number and others do not.
    """
    whole, left = set(), []
    for at, standings in enumerate(zip(*told, strict=True)):
        if Standing.OPEN not in standings:
            continue
        if Standing.WHOLE in standings:
            whole.add(first + at)
            continue
        _check(first + at, standings)
        left.append(first + at)
    return Settlement(whole, left)


def made_by_all(numbers: Sequence[int], told: Sequence[bytes]) -> list[int]:
    """Which of these calls every worker has made.

    Raises:
        NumbersDiffer: as `settle`.
    """
    made = []
    for number, standings in zip(numbers, zip(*told, strict=True), strict=True):
        _check(number, standings)
        if Standing.UNMADE not in standings:
            made.append(number)
    return made


def _check(number: int, standings: Sequence[int]) -> None:
    if Standing.OTHER in standings:
        raise NumbersDiffer(
            f"rank {standings.index(Standing.OPEN)} made all_reduce {number}, whose number rank "
            f"{standings.index(Standing.OTHER)} skipped, or gave to another call"
        )
