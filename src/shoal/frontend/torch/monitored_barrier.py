"""A barrier that names the ranks that did not reach it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, cast

from shoal.errors import Closed, TimedOut
from shoal.frontend.torch.tensor_buffers import describe

if TYPE_CHECKING:
    from shoal.group.group import Group
    from shoal.group.work import Work


def monitored_barrier(parent: Group, timeout_s: float) -> None:
    """Wait until every rank arrives; the parent group stays usable if some do not.

    Rank 0 waits `timeout_s`; the others a second longer for its answer. TimedOut names the ranks
    that had not arrived. PeerLost names a rank that has ended, without waiting.
    """
    if parent.size == 1:
        return
    doing = describe(parent, "monitored_barrier")
    # A group for each barrier, so that a failure ends no other group. NOT one until a failure: it
    # may fail on some ranks only, and later barriers would not match.
    group = parent.subgroup(range(parent.size), "monitored_barrier")
    if parent.rank == 0:
        _release_all(group, doing, timeout_s)
    else:
        _report(group, doing, timeout_s)


def _release_all(group: Group, doing: str, timeout_s: float) -> None:
    """On rank 0: receive a message from each rank, send one to each, and receive another.

    The last message distinguishes a rank that still waits from one that gave up meanwhile.
    """
    deadline = time.monotonic() + timeout_s
    arrivals: dict[int, Work] = {}
    try:
        for rank in range(1, group.size):
            arrivals[rank] = _receive(group, rank, timeout_s)
        for arrival in arrivals.values():
            arrival.wait(max(deadline - time.monotonic(), 0.0))
        for rank in arrivals:
            group.send(bytearray(1), rank, timeout_s=timeout_s + _GRACE_S)
        for departure in [_receive(group, rank, timeout_s) for rank in arrivals]:
            departure.wait(_GRACE_S)
    except Closed as error:
        why = f"{doing}: another rank gave up, and only the barrier's group ended"
        raise TimedOut(f"{why}: {error}") from error
    except TimedOut as error:
        late = ", ".join(str(rank) for rank, work in arrivals.items() if not work.done())
        why = f"{doing}: within {timeout_s:g} s these ranks had not arrived: {late or 'none'}"
        group.abort(why)
        raise TimedOut(f"{why}; look at what they are doing") from error


def _report(group: Group, doing: str, timeout_s: float) -> None:
    """On every other rank: send rank 0 a message, wait for its answer, and confirm it."""
    try:
        group.send(bytearray(1), 0, timeout_s=timeout_s + _GRACE_S)
        _receive(group, 0, timeout_s).wait(timeout_s + _MARGIN_S)
        group.send(bytearray(1), 0, timeout_s=timeout_s + _GRACE_S)
    except Closed as error:  # with rank 0's list of the missing
        raise TimedOut(f"{doing} failed, and only the barrier's group ended: {error}") from error
    except TimedOut as error:
        why = f"{doing}: received nothing from rank 0 for {timeout_s:g} s"
        group.abort(why)
        raise TimedOut(f"{why}; rank 0 or another rank has not arrived") from error


def _receive(group: Group, rank: int, timeout_s: float) -> Work:
    # NOT this call's deadline: it would end the group before the others get the reason.
    longer = timeout_s + _GRACE_S
    return cast("Work", group.recv(bytearray(1), rank, timeout_s=longer, async_op=True))


_MARGIN_S: Final = 1.0  # ranks wait this much longer than rank 0, for its list of missing ranks
_GRACE_S: Final = 5.0  # messages have this much more time than the barrier
