"""Ends the wait of other ranks for arrays missing on a rank, with the names of the arrays."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from shoal import threads
from shoal.errors import Closed, ShoalError, UsageError
from shoal.limits import FIRST_NAMED_KEY
from shoal.plan.text import listed

if TYPE_CHECKING:
    from shoal.group.group import Group

_MARK: Final = "no average: "

GO_ON: Final = (
    "; the group has ended: call shrink() of it on every rank (in torch "
    "shoal.torch.shrink_group()), then regroup() of the averager, wrapper or optimizer"
)
"""The advice in an error that ended the group because a rank could not end its step."""

_MOST_NAMED: Final = 5

# Seconds that a rank waits for all others to announce missing arrays too. If one of them is later,
# the group ends without need; a longer wait delays the error.
_GRACE_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.05

# The part of the deadline for which others may wait for a rank's missing arrays, and the number of
# looks in that time. They may have waited for up to one look longer than the rank has seen.
_PATIENCE: Final = 0.75
_N_LOOKS: Final = 6

_LOCK_S: Final = 5.0  # limit of the wait for the links' lock


def named(names: Sequence[str]) -> str:
    """List the first names, and the number of the others."""
    return listed(names, _MOST_NAMED)


def end_group(group: Group, why: str) -> None:
    """End the group on every rank, because this rank cannot end its step.

    Calls in flight on all ranks raise this reason too, so it includes the advice `GO_ON`.
    """
    group.abort(f"{_MARK}{why}{GO_ON}")


@contextlib.contextmanager
def explaining(group: Group) -> Iterator[None]:
    """Raise UsageError with the reason in place of Closed, if a rank has called `end_group`."""
    try:
        yield
    except Closed as error:
        _, mark, why = str(error).partition(_MARK)
        if not mark:
            raise
        raise UsageError(f"{group}: {why}") from error


def check_alive(group: Group) -> None:
    """Raise the error that ended the group, explained; return if it has not ended."""
    with explaining(group):
        if (error := group.ended()) is not None:
            raise error


def announce(group: Group, name: str, why: str, begun: Collection[int] | None = None) -> None:
    """Notify the ranks that wait for this rank that its arrays will not arrive.

    Every rank with missing arrays calls it. It returns when all ranks have called it, so that no
    rank waits and the group stays usable; or when the group has ended, on every rank, with `why`.

    Args:
        name: the name of the step's averager, the same on every rank.
        begun: the calls that this rank has not made, in a step that other ranks may have left too
            after some of its calls. Another rank waits if it made all of these calls. With None it
            waits if it made any call that this rank has not made.
    """
    is_awaited = is_waited_for if begun is None else functools.partial(has_made_all, numbers=begun)
    until = time.monotonic() + min(_GRACE_S, group.timeout_s / 4)
    with contextlib.suppress(ShoalError):  # the group has ended, on the other ranks too
        lacking = group.all_gather(
            bytearray(group.size), bytearray(1), name=f"{name}, lacking", async_op=True
        )
        assert lacking is not None  # it is in the background
        while not lacking.done():
            if time.monotonic() >= until or is_awaited(group):
                end_group(group, why)
                return
            lacking.drive(_LOOK_EVERY_S)
        # NOT left out: a rank that continues before all are here would look like a waiting rank.
        group.barrier(name=f"{name}, all lacking")


def is_waited_for(group: Group, numbers: Collection[int] | None = None) -> bool:
    """Return True if another rank is known to have made a call that this rank has not made.

    Costs about a millisecond.

    Args:
        numbers: consider only calls with these numbers; None: all numbered calls.
    """
    keys = _made_by_others(group)
    return any(key < FIRST_NAMED_KEY if numbers is None else key in numbers for key in keys)


def has_made_all(group: Group, numbers: Collection[int]) -> bool:
    """Return True if one other rank is known to have made all these calls, and there are some."""
    made = _made_by_others(group)
    return bool(numbers) and bool(set.intersection(*(made.get(n, set()) for n in numbers)))


def _made_by_others(group: Group) -> dict[int, set[int]]:
    """Return the calls not made by this rank: for each key, the ranks known to have made it."""
    state = group.mesh.state(_LOCK_S) if group.mesh is not None else None
    made: dict[int, set[int]] = {}
    if state is None or group.native_id is None:
        return made
    own = f"{group.native_id:016x}"
    for channel in (state, *state.get("more", ())):
        for call in (c for g in channel["groups"] if g["id"] == own for c in g["made_by_others"]):
            made.setdefault(int(call["key"], 16), set()).update(call["by"])
    return made


class StepWatch:
    """Ends the group if a step makes no progress on this rank while other ranks wait for it.

    It acts before the deadline of the other ranks, whose error would not name the missing arrays.
    It measures how long others wait, not how long the step has made no progress.

    Args:
        numbers: the live set of the step's calls still to be made. Another thread reads it.
    """

    def __init__(self, group: Group, numbers: Collection[int]) -> None:
        self.group = group
        self.numbers = numbers
        self._over: threading.Event | None = None

    def start(self, why: str) -> None:
        """Watch until `stop`; the missing arrays may still become ready."""
        self.stop()
        self._over = over = threading.Event()
        every_s = _PATIENCE * self.group.timeout_s / _N_LOOKS
        # The thread does NOT keep this object alive, and deletion does NOT stop the thread: the
        # garbage collector may run under the lock that stopping takes.
        threads.start("shoal-watch", _watch, weakref.ref(self), over, every_s, why)

    def stop(self) -> None:
        """Stop watching. Idempotent."""
        over, self._over = self._over, None
        if over is not None:
            over.set()


def _watch(held: weakref.ref[StepWatch], over: threading.Event, every_s: float, why: str) -> None:
    n_seen = 0
    with contextlib.suppress(ShoalError):  # the group has ended
        while n_seen < _N_LOOKS:
            if over.wait(every_s):
                return
            watch = held()
            if watch is None or watch.group.mesh is None or watch.group.ended() is not None:
                return
            n_seen = n_seen + 1 if is_waited_for(watch.group, watch.numbers) else 0
            if n_seen == _N_LOOKS and not over.is_set():
                end_group(watch.group, why)
            del watch  # NOT kept while this waits
