"""Completes the calls of a view that ends, on all workers together."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from shoal.errors import ShoalError, UsageError
from shoal.group.pool.mend import mend
from shoal.group.work import FOR_EVER_S
from shoal.plan.text import counted

if TYPE_CHECKING:
    from shoal.group.pool.pool import Pool
    from shoal.group.pool.served_call import ServedCall
    from shoal.group.pool.view import View

_LOG: Final = logging.getLogger("shoal")
_LOOK_S: Final = 0.05  # a waiting thread's interval for checking whether the workers' group lives


class Standing(IntEnum):
    """The state of a call on one worker."""

    UNMADE = 0  # the worker may still make it
    OPEN = 1  # it was made; its servers have not ended it, and never will
    WHOLE = 2  # it has succeeded, so all workers hold the complete result
    OTHER = 3  # its number was skipped, or used for a call without servers


class NumbersDiffer(UsageError):  # noqa: N818 - names the fault
    """Some workers used a number for a call, and others did not."""


def settle(first: int, by_worker: Sequence[bytes]) -> tuple[set[int], list[int]]:
    """Decide about calls from `first` on, by each worker's `Standing` of each call.

    Returns the calls that are open on some worker and whole on another, and the calls to mend, each
    once all workers have made it. All other calls are over, or no worker has made them yet.
    A pure function. Raises NumbersDiffer if some workers use a number and others do not.
    """
    whole, left = set[int](), list[int]()
    for at, standings in enumerate(zip(*by_worker, strict=True)):
        if Standing.OPEN not in standings:
            continue
        if Standing.WHOLE in standings:
            whole.add(first + at)
            continue
        _check(first + at, standings)
        left.append(first + at)
    return whole, left


def made_by_all(numbers: Sequence[int], by_worker: Sequence[bytes]) -> list[int]:
    """Return the calls that every worker has made; raises NumbersDiffer as `settle` does."""
    made = []
    for number, standings in zip(numbers, zip(*by_worker, strict=True), strict=True):
        _check(number, standings)
        if Standing.UNMADE not in standings:
            made.append(number)
    return made


def _check(number: int, standings: Sequence[int]) -> None:
    if Standing.OTHER in standings:
        raise NumbersDiffer(
            f"rank {standings.index(Standing.OPEN)} called all_reduce #{number}, but rank "
            f"{standings.index(Standing.OTHER)} skipped #{number} or used it for another call"
        )


def finish(pool: Pool, view: View, end: int) -> None:
    """Complete the calls before `end` that the servers of a view have not completed.

    Calls that no worker has made yet will run without servers. Raises NumbersDiffer if a worker
    skipped a call's number, ShoalError if the workers' group has ended.
    """
    started = time.monotonic()
    with pool.changed:
        view.is_settling = True
        calls = list(view.calls)
    for call in calls:
        _await(pool, call)
    begin = min([pool.lowest_open(), *(call.number for call in calls if not call.is_whole)])
    begin = max(view.begin, -pool.control.most(-begin))
    whole, left = settle(begin, _standings(pool, view, range(begin, end)))
    with pool.changed:
        for call in calls:
            if call.number in whole:
                call.is_mended = True
        view.left, view.is_settling = frozenset(left), False
    pool.call_back()
    _mend_all(pool, view, left)
    n_open = len(whole) + len(left)
    if n_open and pool.rank == 0:
        took_ms = 1e3 * (time.monotonic() - started)
        _LOG.warning(
            "%s: a server of view %d was lost; %s in flight %s completed without it in %.0f ms",
            *(pool.control, view.number, counted(n_open, "call")),
            *("was" if n_open == 1 else "were", took_ms),
        )


def _await(pool: Pool, call: ServedCall) -> None:
    """Wait until the native core has released a call's memory; raise if the world ends first."""
    while call.servers is not None and not call.servers.wait(_LOOK_S):
        pool.check_world()


def _standings(pool: Pool, view: View, numbers: Collection[int]) -> list[bytes]:
    with pool.changed:
        own = bytes(view.standings(numbers, pool.can_make))
    return pool.control.bytes_of_all(own, FOR_EVER_S) if own else [b""] * pool.control.size


def _mend_all(pool: Pool, view: View, left: Sequence[int]) -> None:
    """Mend these calls, each once all workers have made it, in any order."""
    while left:
        made = made_by_all(left, _standings(pool, view, left))
        for number in made:
            _mend(pool, view, number)
        left = [number for number in left if number not in made]
        pool.expire_late()
        pool.check_world()
        with pool.changed:
            if left and any(map(pool.can_make, left)):
                pool.changed.wait(_LOOK_S)


def _mend(pool: Pool, view: View, number: int) -> None:
    with pool.changed:
        call = next((call for call in view.calls if call.number == number), None)
        if call is None or call.outcome is not None:  # the memory is the caller's again
            raise ShoalError("the group of the workers has ended")
        call.is_mending = True
    has_all = False
    try:
        mend(pool.control, call)
        has_all = True
        pool.control.most(0)  # wait for all workers: one whose call has ended may leave
    finally:
        with pool.changed:
            call.is_mending, call.is_mended = False, has_all
    pool.call_back()
