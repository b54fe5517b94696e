"""A rank lacks arrays of a step that others wait for: it tells them which, and who lacks them."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from shoal import threads
from shoal.errors import Closed, ShoalError, UsageError
from shoal.limits import FIRST_NAMED_KEY

if TYPE_CHECKING:
    from shoal.group.group import Group

MARK: Final = "no average: "
"""How a rank that cannot end its step tells the others why the group ends."""

GO_ON: Final = (
    "; the group has ended: call shrink() of it on every rank (in torch "
    "shoal.torch.shrink_group()), and begin anew with what it returns"
)
"""What ranks do next whose group has ended since one of them could not end its step."""

# For so long a rank asks whether all others lack something too. Where one of them is later than
# that the group ends, which it need not; a longer time delays the error that is to be told.
_GRACE_S: Final = 10.0
_LOOK_EVERY_S: Final = 0.05

# Of the deadline: for so long others may wait for a rank that has more to give. It looks so often
# in that time, as nobody tells since when they wait: it may be for one look less.
_PATIENCE: Final = 0.75
_N_LOOKS: Final = 6

_LOCK_S: Final = 5.0  # to wait for the links' lock


def reason_of(group: Group, error: Closed) -> UsageError | None:
    """What to raise in place of this where the group ended since a rank lacked something."""
    _, mark, why = str(error).partition(MARK)
    return UsageError(f"{group}: {why}{GO_ON}") if mark else None


def tell(group: Group, name: str, why: str, begun: Collection[int] | None = None) -> None:
    """Tell the ranks that wait for this one that they do so in vain.

    Every rank that lacks something calls it. It returns when all ranks have: nobody waits, and the
    group goes on; or when the group has ended, on every rank and with this reason.

    Args:
        name: of the step's averager, or of whatever averages; the same on every rank.
        begun: the calls that this rank has not made of a step that others may have left, too, with
            some of its calls made. Who has made all of these waits; None: who has made any call.
    """
    is_vain = is_waited_for if begun is None else functools.partial(has_made_all, numbers=begun)
    until = time.monotonic() + min(_GRACE_S, group.timeout_s / 4)
    with contextlib.suppress(ShoalError):  # it has ended, and others have heard of that
        lacking = group.all_gather(
            bytearray(group.size), bytearray(1), name=f"{name}, lacking", async_op=True
        )
        assert lacking is not None  # it is in the background
        while not lacking.done():
            if time.monotonic() >= until or is_vain(group):
                group.abort(MARK + why)
                return
            lacking.drive(_LOOK_EVERY_S)
        # NOT left out: a rank that goes on before all are here would look like one that waits.
        group.barrier(name=f"{name}, all lacking")


def tell_or_raise(group: Group, name: str, why: str, begun: Collection[int]) -> None:
    """As `tell`, where the group is to go on.

    Raises:
        ShoalError: it has ended; `UsageError` with a rank's reason, where one gave it.
    """
    tell(group, name, why, begun)
    error = group.ended()
    if error is not None:
        raise (reason_of(group, error) if isinstance(error, Closed) else None) or error


def is_waited_for(group: Group, numbers: Collection[int] | None = None) -> bool:
    """True if another rank is known to have made a call that this one has not.

    Costs about a millisecond.

    Args:
        numbers: of the calls that count; None: all that have one.
    """
    keys = _made_by_others(group)
    return any(key < FIRST_NAMED_KEY if numbers is None else key in numbers for key in keys)


def has_made_all(group: Group, numbers: Collection[int]) -> bool:
    """True if one other rank is known to have made all of these calls, and there are any."""
    made = _made_by_others(group)
    return bool(numbers) and bool(set.intersection(*(made.get(n, set()) for n in numbers)))


def _made_by_others(group: Group) -> dict[int, set[int]]:
    """The calls that this rank has not made, by key, each with the ranks known to have made it."""
    mesh = group.mesh
    told = mesh.state(_LOCK_S) if mesh is not None else None
    made: dict[int, set[int]] = {}
    if told is None or group.native_id is None:
        return made
    own = f"{group.native_id:016x}"
    for channel in (told, *told.get("more", ())):
        for call in (c for g in channel["groups"] if g["id"] == own for c in g["made_by_others"]):
            made.setdefault(int(call["key"], 16), set()).update(call["by"])
    return made


class StepWatch:
    """Ends a step that has begun here and goes no further, before the others' deadline does.

    Theirs would end the group too, but they do not know what is lacking. What counts is how long
    others wait, not how long the step has stood still: nobody minds that.

    Args:
        numbers: of the step's calls that are not made yet. Read by another thread.
    """

    def __init__(self, group: Group, numbers: Collection[int]) -> None:
        self._group = group
        self._numbers = numbers
        self._over: threading.Event | None = None

    def start(self, why: str) -> None:
        """From now on it is waited for that the rest comes."""
        self.stop()
        self._over = over = threading.Event()
        every_s = _PATIENCE * self._group.timeout_s / _N_LOOKS
        # NOT held by its thread, and that not told when this goes: who collects garbage may be in
        # the very lock that telling takes.
        threads.start("shoal-watch", _watch, weakref.ref(self), over, every_s, why)

    def stop(self) -> None:
        """It comes, or is told of elsewhere. Idempotent."""
        over, self._over = self._over, None
        if over is not None:
            over.set()

    def is_over(self) -> bool:
        """Whether the group has ended or was closed, and nobody waits any longer."""
        return self._group.mesh is None or self._group.ended() is not None

    def is_waited_for(self) -> bool:
        """Whether another rank is known to wait for this step."""
        return is_waited_for(self._group, self._numbers)

    def end(self, why: str) -> None:
        """End the group: others have waited for long."""
        self._group.abort(MARK + why)


def _watch(held: weakref.ref[StepWatch], over: threading.Event, every_s: float, why: str) -> None:
    n_seen = 0
    with contextlib.suppress(ShoalError):  # the group has ended
        while n_seen < _N_LOOKS:
            if over.wait(every_s):
                return
            watch = held()
            if watch is None or watch.is_over():
                return
            n_seen = n_seen + 1 if watch.is_waited_for() else 0
            if n_seen == _N_LOOKS and not over.is_set():
                watch.end(why)
            del watch  # NOT kept while this waits
